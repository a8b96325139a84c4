//! Every operation on every transport against a sequential reference.

mod support;

use deuteron_collective::{Group, GroupOptions, ReduceOp};
use std::time::Duration;
use support::{Over, run};

#[test]
fn smoke() {
    for over in Over::ALL {
        for ranks in [1, 2, 3, 4, 5, 8] {
            let results = run(over, ranks, |group| {
                let mut out = Vec::new();
                for len in [0usize, 1, 9, 100, 3000, 100_000, 600_000] {
                    let mut tensor: Vec<f32> =
                        (0..len).map(|i| (i % 100) as f32 + group.rank() as f32).collect();
                    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                    let base: usize = (0..ranks).sum();
                    for (i, v) in tensor.iter().enumerate() {
                        assert_eq!(
                            *v,
                            (base + ranks * (i % 100)) as f32,
                            "{over:?} {ranks} {len} {i}"
                        );
                    }
                    let input = vec![group.rank() as i64; len];
                    let mut output = vec![-1i64; len * ranks];
                    group.all_gather(&input, &mut output)?;
                    assert!(output.iter().enumerate().all(|(i, v)| *v as usize == i / len.max(1)));
                    let root = len % ranks;
                    let mut cast = vec![group.rank() as i16; len];
                    group.broadcast(&mut cast, root)?;
                    assert!(cast.iter().all(|v| *v as usize == root));
                    out.push(tensor.len());
                    let mut bucket = group.bucket::<f32>(len)?;
                    bucket.fill(group.rank() as f32 + 1.0);
                    group.all_reduce(&mut bucket, ReduceOp::Mean)?;
                    let mean = (0..ranks).map(|r| r as f32 + 1.0).sum::<f32>() / ranks as f32;
                    assert!(bucket.iter().all(|v| *v == mean));
                    group.barrier()?;
                }
                Ok(out)
            });
            assert!(results.iter().all(Result::is_ok), "{over:?} {ranks} {results:?}");
        }
    }
}
