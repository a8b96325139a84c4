//! Tuned groups: measured together, kept by rank 0, the same on every rank.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{
    Error, Group, Kind, ReduceOp, Tuning,
    plan::Thresholds,
    tune::{Constants, Tuned},
};
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};
use support::{Over, all, run, run_with};

/// A folder that is gone afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("deuteron-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What every rank was told, which has to be the same, and that calls of all sizes work with it.
fn tuned(over: Over, ranks: usize, tuning: impl Fn(usize) -> Tuning + Sync) -> Vec<Tuned> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let tuning = || tuning(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let found = all(run_with(
        over,
        ranks,
        |options| options.tuning(tuning()),
        |group| {
            for len in [1, 100, 1_000, 10_000, 300_000] {
                let mut tensor = vec![1f32; len];
                group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                assert!(tensor.iter().all(|value| *value == group.size() as f32));
                group.broadcast(&mut tensor, len % group.size())?;
            }
            let tuned = group.tuned().unwrap().clone();
            assert_eq!(*group.thresholds(), tuned.thresholds);
            let pair = group.subgroup(&[0])?;
            assert!(pair.is_none_or(|pair| *pair.thresholds() == tuned.thresholds));
            Ok(tuned)
        },
    ));
    assert!(found.iter().all(|one| one.thresholds == found[0].thresholds), "{found:#?}");
    assert!(found.iter().all(|one| one.fresh == found[0].fresh), "{found:#?}");
    found
}

#[test]
fn every_transport_is_measured_in_no_time_and_alike_on_all_ranks() {
    for over in Over::ALL {
        for ranks in [1, 2, 3, 4] {
            let start = Instant::now();
            let found = tuned(over, ranks, |_| Tuning::Measured);
            let Tuned { constants, decisions, file, fresh, .. } = &found[0];
            println!(
                "{over:?}, {ranks} ranks, {:?}: {constants:#?} {decisions:#?}",
                start.elapsed()
            );
            assert!(*fresh && file.is_none());
            assert_eq!(decisions.is_empty(), ranks == 1);
            assert!(ranks == 1 || constants.exchange > 0.0);
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
    }
}

#[test]
fn what_was_measured_is_kept_by_rank_0_and_used_again() {
    let folder = Folder::new("tuning");
    let cached = |_| Tuning::Cached(folder.0.clone());
    for over in [Over::SharedMemory, Over::Tcp] {
        let first = tuned(over, 3, cached);
        assert!(first[0].fresh);
        let file = first[0].file.clone().unwrap();
        assert!(file.exists() && first[1].file.is_none());
        let again = tuned(over, 3, cached);
        assert!(!again[0].fresh && again[0].thresholds == first[0].thresholds);
        assert_eq!(again[0].decisions, first[2].decisions);
        fs::write(&file, "key = nonsense\n").unwrap();
        assert!(tuned(over, 3, cached)[0].fresh, "a broken file is measured anew");
        assert!(!tuned(over, 3, cached)[0].fresh, "and mended");
    }
    assert_eq!(folder.files().len(), 2, "one for each transport: {:?}", folder.files());
    assert!(tuned(Over::SharedMemory, 2, cached)[0].fresh, "another number of ranks");
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let found = tuned(Over::SharedMemory, 2, |_| Tuning::Cached("/proc/nowhere".into()));
    assert!(found[0].fresh);
}

/// Without tuning, how a call is carried out is the same on every machine.
#[test]
fn bare_groups_are_not_tuned() -> Result<(), Error> {
    all(run(Over::SharedMemory, 2, |group: Group| {
        assert!(group.tuned().is_none());
        assert_eq!(*group.thresholds(), Thresholds::default());
        assert_eq!(group.explain(Kind::AllReduce, 1 << 20, false).chunk % Constants::CHUNKS[0], 0);
        Ok(())
    }));
    Ok(())
}
