//! Many ranks in one process, each as if on a host of its own: how long they take to meet, and over what.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::ReduceOp;
use std::{fs, sync::Mutex, time::Instant};
use support::{Over, all, run};

/// Sockets are counted, and time is: one test after the other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn sockets() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn ranks_meet_in_time_and_connections_grow_with_n_log_n() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for ranks in [16usize, 64, 256] {
        let began = Instant::now();
        let found = all(run(Over::Tls, ranks, |group| {
            let took = began.elapsed();
            let mut one = [1i64];
            group.all_reduce(&mut one, ReduceOp::Sum)?;
            assert_eq!(one, [ranks as i64]);
            let sockets = if group.rank() == 0 { sockets() } else { 0 };
            group.barrier()?;
            Ok((took, sockets))
        }));
        let slowest = found.iter().map(|(took, _)| *took).max().unwrap();
        let sockets = found[0].1;
        println!("{ranks} ranks with TLS met in {slowest:.2?} and hold {sockets} sockets");
        assert!(
            slowest.as_secs() < 25,
            "{ranks} ranks took {slowest:?}, and 256 should take less than 5 s"
        );
        // Two connections a pair, two ends each; a rank has log₂ n + 3 peers at most.
        assert!(sockets <= 2 * ranks * (ranks.ilog2() as usize + 3) + 64, "{sockets} sockets");
    }
}

/// More ranks call at once than a waiting room has places, and all get in.
#[test]
fn the_first_all_to_all_connects_everybody() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    for (over, ranks) in [(Over::Tcp, 80usize), (Over::Tls, 24)] {
        let slowest = all(run(over, ranks, |group| {
            let (rank, began) = (group.rank(), Instant::now());
            for round in 0..3 {
                let input: Vec<i32> =
                    (0..ranks).map(|to| (to * 1000 + rank + round) as i32).collect();
                let mut output = vec![0; ranks];
                group.all_to_all(&input, &mut output)?;
                let expected = |from| (rank * 1000 + from + round) as i32;
                assert!(output.iter().enumerate().all(|(from, got)| *got == expected(from)));
            }
            Ok(began.elapsed())
        }));
        let slowest = slowest.into_iter().max().unwrap();
        println!("{ranks} ranks over {over:?} had their first all-to-alls in {slowest:.2?}");
        assert!(slowest.as_secs() < 25, "{ranks} ranks took {slowest:?}");
    }
}
