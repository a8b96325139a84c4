//! One task of `deuteron bench`: measures, and as rank 0 tells.

use super::{Operation, Wish, homely, sized};
use crate::{error::Error as Refused, status::exit};
use clap::ArgMatches;
use deuteron_collective::{
    DType, Element, Group, GroupOptions, Kind, ReduceOp, plan::Plan, tune::Tuned,
};
use deuteron_gang::{Error, Result, Task};
use half::{bf16, f16};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{self, Write as _},
    time::Instant,
};

/// About how long one row is measured, in seconds.
const EACH: f64 = 0.2;
/// Bounds of how often a call is made for it.
const REPEATS: (f64, f64) = (5.0, 500.0);

/// The hidden subcommand.
pub(crate) fn task(matches: &ArgMatches) -> u8 {
    let measured = Wish::of(matches)
        .map_err(|error: Refused| Error::Invalid(error.to_string()))
        .and_then(|wish| Task::from_environment().map(|task| (wish, task)))
        .and_then(|(wish, task)| measure(&wish, &task));
    match measured {
        Ok(()) => 0,
        Err(error) => {
            // It goes to the command, which says whose it is.
            let _ = writeln!(io::stderr().lock(), "{error}");
            exit::FAILED
        }
    }
}

/// Types that are measured.
trait Number: Element + Default + PartialEq {
    fn of(count: usize) -> Self;
}

macro_rules! numbers {
    ($($number:ident)+) => {$(
        impl Number for $number {
            fn of(count: usize) -> Self {
                count as $number
            }
        }
    )+};
}

numbers! { u8 i8 i16 i32 i64 f32 f64 }

impl Number for f16 {
    fn of(count: usize) -> Self {
        Self::from_f32(count as f32)
    }
}

impl Number for bf16 {
    fn of(count: usize) -> Self {
        Self::from_f32(count as f32)
    }
}

fn measure(wish: &Wish, task: &Task) -> Result<()> {
    match wish.dtype {
        DType::U8 => rows::<u8>(wish, task),
        DType::I8 => rows::<i8>(wish, task),
        DType::I16 => rows::<i16>(wish, task),
        DType::I32 => rows::<i32>(wish, task),
        DType::I64 => rows::<i64>(wish, task),
        DType::F16 => rows::<f16>(wish, task),
        DType::Bf16 => rows::<bf16>(wish, task),
        DType::F64 => rows::<f64>(wish, task),
        _ => rows::<f32>(wish, task),
    }
}

/// Every row that makes sense on this group, in the order of the table.
fn plans(wish: &Wish, group: &Group) -> Vec<(Operation, usize, bool)> {
    let memory: &[bool] =
        if group.shares_memory() && group.size() > 1 { &[false, true] } else { &[false] };
    let mut plans = Vec::new();
    for operation in &wish.operations {
        match operation {
            Operation::Barrier => plans.push((*operation, 0, false)),
            _ => {
                for size in &wish.sizes {
                    let size = match operation {
                        // Every rank gets a part of the same length.
                        Operation::ReduceScatter | Operation::AllToAll => {
                            size.next_multiple_of(wish.dtype.size() * group.size())
                        }
                        _ => *size,
                    };
                    plans.extend(memory.iter().map(|registered| (*operation, size, *registered)));
                }
            }
        }
    }
    plans
}

fn rows<T: Number>(wish: &Wish, task: &Task) -> Result<()> {
    let group = task.group(GroupOptions::default())?;
    let plans = plans(wish, &group);
    let mut rows = Vec::with_capacity(plans.len());
    for (index, &(operation, bytes, registered)) in plans.iter().enumerate() {
        if task.rank() == 0 {
            say(&format!(
                "{} {} ({} of {})",
                operation.name(),
                if bytes == 0 { String::new() } else { sized(bytes as u64) },
                index + 1,
                plans.len()
            ));
        }
        let times = row::<T>(&group, operation, bytes / size_of::<T>(), registered)?;
        rows.push(described(&group, operation, bytes, registered, &times));
    }
    group.barrier()?;
    if task.rank() == 0 {
        let result = report(wish, &group, rows);
        task.set_result(result.to_string().as_bytes())?;
    }
    Ok(())
}

/// How far it is, for whoever watches; nobody has to.
fn say(text: &str) {
    let _ = io::stdout().lock().write_all(format!("{text}\n").as_bytes());
}

/// The times of one call in seconds, sorted, each of the slowest rank.
fn row<T: Number>(
    group: &Group,
    operation: Operation,
    len: usize,
    registered: bool,
) -> Result<Vec<f64>> {
    let mut plain = Vec::new();
    let mut bucket = None;
    if registered {
        bucket = Some(group.bucket::<T>(len)?);
    } else {
        plain = vec![T::default(); len];
    }
    let tensor = bucket.as_deref_mut().unwrap_or(&mut plain);
    let mut output = vec![
        T::default();
        match operation {
            Operation::AllGather => len * group.size(),
            Operation::ReduceScatter => len / group.size(),
            Operation::AllToAll => len,
            _ => 0,
        }
    ];
    tensor.fill(T::of(1));
    call(group, operation, tensor, &mut output)?;
    check(group, operation, tensor, &output)?;
    // Sums of zeros stay what they are.
    tensor.fill(T::default());
    let mut once = || -> Result<f64> {
        group.barrier()?;
        let start = Instant::now();
        call(group, operation, tensor, &mut output)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut first = [once()?.max(once()?)];
    group.all_reduce(&mut first, ReduceOp::Max)?;
    let repeats = (EACH / first[0]).clamp(REPEATS.0, REPEATS.1) as usize;
    let mut times = (0..repeats).map(|_| once()).collect::<Result<Vec<f64>>>()?;
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn call<T: Number>(
    group: &Group,
    operation: Operation,
    tensor: &mut [T],
    output: &mut [T],
) -> Result<()> {
    let called = match operation {
        Operation::AllReduce => group.all_reduce(tensor, ReduceOp::Sum),
        Operation::AllGather => group.all_gather(tensor, output),
        Operation::ReduceScatter => group.reduce_scatter(tensor, output, ReduceOp::Sum),
        Operation::AllToAll => group.all_to_all(tensor, output),
        Operation::Broadcast => group.broadcast(tensor, 0),
        Operation::Barrier => group.barrier(),
    };
    Ok(called?)
}

/// Sums of ones up to this are exact in every type, or wrap alike on both sides.
const EXACT: usize = 256;

/// What is measured has to be right.
fn check<T: Number>(group: &Group, operation: Operation, tensor: &[T], output: &[T]) -> Result<()> {
    let (result, expected) = match operation {
        Operation::AllReduce | Operation::ReduceScatter if group.size() > EXACT => return Ok(()),
        Operation::AllReduce => (tensor, T::of(group.size())),
        Operation::ReduceScatter => (output, T::of(group.size())),
        Operation::AllGather | Operation::AllToAll => (output, T::of(1)),
        Operation::Broadcast | Operation::Barrier => (tensor, T::of(1)),
    };
    if result.iter().all(|value| *value == expected) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{} gave a wrong result, which is a bug", operation.name())))
}

fn described(
    group: &Group,
    operation: Operation,
    bytes: usize,
    registered: bool,
    times: &[f64],
) -> Value {
    let kind = match operation {
        Operation::AllReduce => Kind::AllReduce,
        Operation::AllGather => Kind::AllGather,
        Operation::ReduceScatter => Kind::ReduceScatter,
        Operation::AllToAll => Kind::AllToAll,
        Operation::Broadcast => Kind::Broadcast,
        Operation::Barrier => Kind::Barrier,
    };
    let Plan { algorithm, chunk, reason } = group.explain(kind, bytes, registered);
    let median = times[times.len() / 2];
    let moved = operation.moved(group.size()) * bytes as f64;
    json!({
        "operation": operation.name(),
        "bytes": bytes,
        "registered": registered,
        "calls": times.len(),
        "median_seconds": median,
        "least_seconds": times.first(),
        "most_seconds": times.last(),
        "bus_bytes_per_second": (moved > 0.0).then(|| moved / median),
        "algorithm": format!("{algorithm:?}"),
        "chunk": chunk,
        "reason": reason,
    })
}

fn report(wish: &Wish, group: &Group, rows: Vec<Value>) -> Value {
    let hosts: BTreeSet<&str> = (0..group.size()).map(|rank| group.host(rank)).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ranks": group.size(),
        "hosts": hosts,
        "cores": group.topology().cores,
        "shares_memory": group.shares_memory(),
        "dtype": wish.dtype.name(),
        "tuning": group.tuned().map(tuning),
        "rows": rows,
    })
}

fn tuning(tuned: &Tuned) -> Value {
    // What was not measured is not a number, which JSON does not have.
    let known = |number: f64| number.is_finite().then_some(number);
    let constants = &tuned.constants;
    let decisions = tuned.decisions.iter().map(|decision| {
        json!({ "name": decision.name, "bytes": decision.bytes, "reason": decision.reason })
    });
    json!({
        "measured_now": tuned.fresh,
        "file": tuned.file.as_deref().map(homely),
        "exchange_seconds": known(constants.exchange / 1e9),
        "copy_bytes_per_second": known(constants.copy * 1e9),
        "reduce_bytes_per_second": known(constants.reduce * 1e9),
        "latency_seconds": known(constants.latency / 1e9),
        "bandwidth_bytes_per_second": known(constants.bandwidth * 1e9),
        "thresholds": decisions.collect::<Vec<_>>(),
    })
}
