//! A task of a gang: does what its first argument says, and prints what it sees.
//!
//! | mode | does |
//! |---|---|
//! | `meet` | uses the whole barrier context once, and measures a barrier |
//! | `wait` | says `READY process socket`, and waits to be ended |
//! | `tick` | prints a number every 20 ms |
//! | `reduce N` | adds up tensors N times, or for ever with 0 |
//! | `print N` | prints N megabytes in lines of any length, and on standard error their hash |
//! | `fail TEXT` | says why it fails, and exits with 3 |
//! | `alone` | rank 0 returns at once, the others wait for it |
//! | `result N` | returns N bytes |
//! | `payload` | returns the payload's length and hash, and how much memory its agent has had at most |
//! | `payload fail`, `payload orphan` | the same, but in generation 0 rank 0 fails, or kills its agent |
//! | `train FOLDER` | adds up named tensors in many steps; then all wait for rank 1, and rank 1 for `FOLDER/go` |
#![expect(unsafe_code, reason = "alarm is C's")]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that tells its test what it sees"
)]

use deuteron_chaos::Hash;
use deuteron_collective::{GroupOptions, ReduceOp};
use deuteron_gang::{Error, Result, Task, TaskInfo};
use std::{
    io::Write,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// Whatever goes wrong, no task lives longer than this.
const LIFETIME_SECONDS: u32 = 150;
const LIMIT: Option<Duration> = Some(Duration::from_secs(30));

fn main() -> ExitCode {
    // SAFETY: no handler is set; the signal ends the process.
    unsafe { libc::alarm(LIFETIME_SECONDS) };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mode = words.first().map_or("", String::as_str);
    let word = words.get(1).map_or("", String::as_str);
    let number: usize = word.parse().unwrap_or_default();
    let done = Task::from_environment().and_then(|task| match mode {
        "meet" => meet(&task),
        "wait" => wait(&task),
        "tick" => tick(&task),
        "reduce" => reduce(&task, number),
        "print" => print(&task, number),
        "fail" => {
            task.set_failure(word)?;
            Err(Error::Invalid("this is only its standard error".into()))
        }
        "alone" if task.rank() == 0 => Ok(()),
        "alone" => task.barrier(LIMIT),
        "train" => train(&task, word),
        "payload" => payload(&task, word),
        "result" => {
            let byte = task.rank() as u8;
            task.set_result(&vec![byte; number])
        }
        _ => Err(Error::Invalid(format!("there is no mode {mode:?}"))),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ERROR {error}");
            ExitCode::from(3)
        }
    }
}

fn describe(info: &TaskInfo) -> String {
    let devices: Vec<String> = info
        .accelerators
        .iter()
        .map(|device| format!("{}/{}:{}", device.kind, device.model, device.index))
        .collect();
    let TaskInfo { rank, local_rank, local_size, cross_rank, cross_size, host, address, .. } = info;
    let devices = devices.join(",");
    format!(
        "rank={rank} local={local_rank}/{local_size} cross={cross_rank}/{cross_size} host={host} \
         address={address} devices={devices}"
    )
}

fn meet(task: &Task) -> Result<()> {
    for info in task.infos() {
        println!("INFO {}", describe(info));
    }
    println!("OWN {}", describe(task.info()));
    let message = format!("{} of {}", task.rank(), task.size());
    let all = task.all_gather(message.as_bytes(), LIMIT)?;
    let all: Vec<String> = all.iter().map(|text| String::from_utf8_lossy(text).into()).collect();
    println!("GATHERED {}", all.join(", "));

    let mut times = Vec::new();
    for _ in 0..1000 {
        let start = Instant::now();
        task.barrier(LIMIT)?;
        times.push(start.elapsed());
    }
    times.sort();
    println!("BARRIER {}", times[times.len() / 2].as_micros());
    // Two groups, one after the other.
    (0..2).try_for_each(|_| reduce(task, 3))
}

fn wait(task: &Task) -> Result<()> {
    task.barrier(LIMIT)?;
    let socket = std::env::var("DEUTERON_TASK").unwrap_or_default();
    println!("READY {} {socket}", std::process::id());
    thread::sleep(Duration::from_secs(u64::from(LIFETIME_SECONDS)));
    Ok(())
}

fn tick(task: &Task) -> Result<()> {
    task.barrier(LIMIT)?;
    println!("READY {}", std::process::id());
    for number in 0.. {
        println!("TICK {number}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn reduce(task: &Task, rounds: usize) -> Result<()> {
    let group = task.group(GroupOptions::default())?;
    let mut round = 0;
    while rounds == 0 || round < rounds {
        let mut tensor = vec![task.rank() as f32 + 1.0; 100_000];
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        let sum = (1..=task.size()).sum::<usize>() as f32;
        if tensor.iter().any(|element| *element != sum) {
            println!("WRONG RESULT {:?}", &tensor[..4]);
        }
        round += 1;
        if round == 3 {
            println!("REDUCED shares_memory={}", group.shares_memory());
        }
    }
    Ok(())
}

fn train(task: &Task, folder: &str) -> Result<()> {
    // Told what the engine logs.
    let _ = tracing::subscriber::set_global_default(deuteron_chaos::Log);
    let engine = task.engine(GroupOptions::default())?;
    let sum = (1..=task.size()).sum::<usize>() as f32;
    for step in 0..50 {
        let handles: Vec<_> = (0..20)
            .map(|index| {
                let index = if task.rank() == 0 { index } else { 19 - index };
                let tensor = vec![task.rank() as f32 + 1.0; 100 + index];
                engine.all_reduce(format!("layer {index}").as_str(), tensor, ReduceOp::Sum)
            })
            .collect::<Result<_, _>>()?;
        for handle in handles {
            if handle.wait()?.iter().any(|element| *element != sum) {
                println!("WRONG RESULT in step {step}");
            }
        }
    }
    println!("READY {}", std::process::id());
    while task.rank() == 1 && !std::path::Path::new(folder).join("go").exists() {
        thread::sleep(Duration::from_millis(10));
    }
    let mut last = [1i64];
    engine.all_reduce_now("last", &mut last, ReduceOp::Sum)?;
    println!("LAST {}", last[0]);
    if std::env::var_os("DEUTERON_TIMELINE").is_some() {
        engine.stop_timeline()?;
    }
    Ok(())
}

fn payload(task: &Task, how: &str) -> Result<()> {
    let payload = task.payload()?;
    let agent = std::os::unix::process::parent_id();
    if task.generation() == 0 && task.rank() == 0 {
        match how {
            "fail" => return Err(Error::Invalid("as it was asked to".into())),
            // SAFETY: a signal to the process that has started this one.
            "orphan" => drop(unsafe { libc::kill(agent as i32, libc::SIGKILL) }),
            _ => {}
        }
    }
    task.barrier(LIMIT)?;
    let mut hash = Hash::default();
    hash.add(&payload);
    let status = std::fs::read_to_string(format!("/proc/{agent}/status")).unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let most = most.trim().trim_end_matches(" kB");
    // Whoever asks again gets it again.
    let again = task.payload()? == payload;
    let text = format!("{} {} {again} {most}", payload.len(), hash.value());
    task.set_result(text.as_bytes())
}

fn print(task: &Task, megabytes: usize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let failed = |error| Error::System { what: "standard output".into(), error };
    let (mut hash, mut printed, mut line, mut number) = (Hash::default(), 0, Vec::new(), 0usize);
    let mut random = task.rank() as u64 + 1;
    while printed < megabytes << 20 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Mostly short lines; some that fill several pages, one in a while that nearly fills a piece.
        let length = match random >> 60 {
            0 => (random >> 40) as usize % 60_000,
            1..5 => (random >> 40) as usize % 5000,
            _ => (random >> 40) as usize % 200,
        };
        line.clear();
        let _ = write!(line, "{number} of rank {} ", task.rank());
        line.resize(line.len() + length, b'a' + (random >> 33) as u8 % 26);
        line.push(b'\n');
        hash.add(&line);
        out.write_all(&line).map_err(failed)?;
        printed += line.len();
        number += 1;
    }
    out.flush().map_err(failed)?;
    eprintln!("PRINTED {printed} {}", hash.value());
    Ok(())
}
