//! Starts a process per rank on this machine, trains nothing, but moves what training moves: gradients.
//!
//! `cargo run --release --example all_reduce -- [RANKS] [MEBIBYTES]`
#![expect(clippy::print_stdout, reason = "an example talks to its reader")]

use deuteron_collective::{Group, GroupOptions, Kind, ReduceOp, Security, TcpRendezvous};
use std::{
    env,
    error::Error,
    net::{SocketAddr, TcpListener},
    process::Command,
    time::{Duration, Instant},
};

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let mut arguments = env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (ranks, mebibytes) = (number(4)?, number(64)?);
    match env::var("RANK") {
        Ok(rank) => train(rank.parse()?, ranks, mebibytes, env::var("MEETING_POINT")?.parse()?),
        Err(_) => launch(ranks),
    }
}

/// Starts this program once more for every rank and waits for all of them.
fn launch(ranks: usize) -> Outcome {
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    println!("starting {ranks} ranks, each a process of its own; they meet at {free}");
    let children: Vec<_> = (0..ranks)
        .map(|rank| {
            Command::new(env::current_exe()?)
                .args(env::args().skip(1))
                .env("RANK", rank.to_string())
                .env("MEETING_POINT", free.to_string())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("rank {rank}: {status}").into());
        }
    }
    Ok(())
}

/// What every rank does: meet, then average gradients ten times, in place.
fn train(rank: usize, ranks: usize, mebibytes: usize, meeting_point: SocketAddr) -> Outcome {
    let limit = Duration::from_secs(30);
    let rendezvous =
        TcpRendezvous::connect(meeting_point, rank, ranks, 0, &Security::Local, limit)?;
    let group = Group::connect(&rendezvous, GroupOptions::default().limit(limit))?;
    let mut gradients = group.bucket::<f32>(mebibytes << 18)?;
    if rank == 0 {
        let plan = group.explain(Kind::AllReduce, mebibytes << 20, true);
        println!("{mebibytes} MiB of gradients per rank, {:?}: {}", plan.algorithm, plan.reason);
    }
    for step in 1..=10 {
        gradients.fill(rank as f32);
        group.barrier()?;
        let start = Instant::now();
        group.all_reduce(&mut gradients, ReduceOp::Mean)?;
        let time = start.elapsed();
        let expected = (ranks - 1) as f32 / 2.0;
        if gradients.iter().any(|value| *value != expected) {
            return Err(format!("rank {rank} has a wrong mean in step {step}").into());
        }
        if rank == 0 {
            let speed = (mebibytes << 20) as f64 / time.as_secs_f64() / 1e9;
            println!(
                "step {step:2}: mean on all ranks, checked; {time:9.3?}, {speed:.1} GB/s per rank"
            );
        }
    }
    group.barrier()?;
    println!("rank {rank} of {ranks} on {} is done", group.host(rank));
    Ok(())
}
