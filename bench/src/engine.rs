//! Our side through the engine: one named tensor, or many small ones in an order of each rank's own.
#![expect(
    unsafe_code,
    reason = "submits parts of one buffer, as a binding to another language does"
)]

use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::time::Duration;

use deuteron_collective::{
    Element, Engine, EngineOptions, Group, Kind, Prepared, RawTensor, Receipt, ReduceOp, Shape,
    Submission,
};

use crate::measure::{Block, Contestant, Failure, Job, Mode, Number, cpu_nanoseconds, measure};

/// Bytes of one of many tensors.
const SMALL: usize = 1 << 10;
/// Orders in which a rank submits, one after another.
const ORDERS: usize = 8;
/// How long the others let the lowest rank wait.
const ABSENCE: Duration = Duration::from_millis(500);

/// What is submitted.
#[derive(Clone, Copy, PartialEq)]
pub enum Way {
    /// One tensor, by a call that returns when it is done.
    Named,
    /// Tensors of a kibibyte in registered memory, prepared as gradients are, then a wait for each.
    Many,
    /// The same, looked up by name each time.
    ManyNamed,
    /// The same in memory of their own.
    ManyPlain,
    /// As `Many`, with the timeline on.
    ManyTraced,
    /// One tensor for which the others come late; the time is what the waiting rank computes meanwhile.
    Waiting,
}

/// Measures every block through an engine; barriers go through a group of their own.
pub fn run(job: &Job, group: Group, barriers: Group, way: Way) -> Result<(), Failure> {
    let engine = Engine::new(group, EngineOptions::default())?;
    if way == Way::ManyTraced {
        engine.start_timeline(format!("{}.timeline", job.out))?;
    }
    job.run(&mut Ours { engine, barriers, way })
}

struct Ours {
    engine: Engine,
    barriers: Group,
    way: Way,
}

impl Mode for Ours {
    fn measure<T: Number>(&mut self, job: &Job, block: &Block) -> Result<Vec<u64>, Failure> {
        let count = block.count::<T>();
        match self.way {
            Way::Named | Way::Waiting => {
                measure(job, block, &mut One { ours: self, buffer: vec![T::ZERO; count], used: 0 })
            }
            Way::Many | Way::ManyNamed | Way::ManyTraced => {
                // The engine has nothing on its way here, so the group is free.
                let buffer = self.engine.group().bucket::<T>(count)?;
                measure(job, block, &mut Many::new(self, buffer)?)
            }
            Way::ManyPlain => measure(job, block, &mut Many::new(self, vec![T::ZERO; count])?),
        }
    }
}

struct One<'a, T> {
    ours: &'a Ours,
    buffer: Vec<T>,
    used: u64,
}

impl<T: Number> Contestant<T> for One<'_, T> {
    fn input(&mut self) -> &mut [T] {
        &mut self.buffer
    }
    fn output(&self) -> &[T] {
        &self.buffer
    }
    fn summed(&self) -> Range<usize> {
        0..self.ours.engine.size()
    }
    fn barrier(&mut self) -> Result<(), Failure> {
        Ok(self.ours.barriers.barrier()?)
    }
    fn call(&mut self) -> Result<(), Failure> {
        let Ours { engine, way, .. } = self.ours;
        if *way == Way::Named {
            return Ok(engine.all_reduce_now("tensor", &mut self.buffer, ReduceOp::Sum)?);
        }
        let late = engine.rank() > 0;
        if late {
            std::thread::sleep(ABSENCE);
        }
        let before = cpu_nanoseconds();
        engine.all_reduce_now("tensor", &mut self.buffer, ReduceOp::Sum)?;
        self.used = if late { 0 } else { cpu_nanoseconds() - before };
        Ok(())
    }
    fn elapsed(&mut self, start: u64, end: u64) -> Result<u64, Failure> {
        let waiting = self.ours.way == Way::Waiting;
        Ok(if waiting { self.used } else { end - start })
    }
}

struct Many<'a, B> {
    ours: &'a Ours,
    buffer: B,
    /// What is submitted in the order of each call, so that what is measured is the engine and not the search for it.
    orders: Vec<Vec<Submission<'static>>>,
    prepared: Vec<Vec<Arc<Prepared>>>,
    calls: usize,
    receipts: Vec<Receipt>,
}

impl<'a, T: Number, B: DerefMut<Target = [T]>> Many<'a, B> {
    fn new(ours: &'a Ours, mut buffer: B) -> Result<Self, Failure> {
        let (each, count) = (SMALL / size_of::<T>(), buffer.len());
        let (dtype, base) = (<T as Element>::DTYPE, buffer.as_mut_ptr());
        let submission = |index: usize| {
            let shape = Shape::new(&[each.min(count - index * each)]);
            let data = base.wrapping_add(index * each).cast();
            // They live as long as the benchmark.
            Submission {
                name: Some(format!("layer{}.weight.{index}", index / 10).leak()),
                kind: Kind::AllReduce,
                reduction: ReduceOp::Sum.into(),
                root: 0,
                tensors: vec![RawTensor { data, dtype, shape }].leak(),
                splits: &[],
            }
        };
        let tensors = (0..count.div_ceil(each))
            .map(|index| {
                let submission = submission(index);
                Ok((submission, Arc::new(ours.engine.prepare(&submission)?)))
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let mut random = 0x9e37_79b9_7f4a_7c15 ^ ours.engine.rank() as u64;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random as usize % below
        };
        let order = |_| {
            let mut order = tensors.clone();
            (1..order.len()).rev().for_each(|index| order.swap(index, next(index + 1)));
            order
        };
        let (orders, prepared) =
            (0..ORDERS).map(order).map(|order: Vec<_>| order.into_iter().unzip()).unzip();
        Ok(Self { ours, buffer, orders, prepared, calls: 0, receipts: Vec::new() })
    }
}

impl<T: Number, B: DerefMut<Target = [T]>> Contestant<T> for Many<'_, B> {
    fn input(&mut self) -> &mut [T] {
        &mut self.buffer
    }
    fn output(&self) -> &[T] {
        &self.buffer
    }
    fn summed(&self) -> Range<usize> {
        0..self.ours.engine.size()
    }
    fn barrier(&mut self) -> Result<(), Failure> {
        Ok(self.ours.barriers.barrier()?)
    }
    fn call(&mut self) -> Result<(), Failure> {
        let engine = &self.ours.engine;
        self.receipts.clear();
        let order = self.calls % ORDERS;
        if self.ours.way == Way::ManyNamed {
            for submission in &self.orders[order] {
                // SAFETY: disjoint parts of the buffer, which is not touched before all of them are done.
                self.receipts.push(unsafe { engine.submit(submission)? });
            }
        } else {
            for prepared in &self.prepared[order] {
                // SAFETY: as above.
                self.receipts.push(unsafe { engine.submit_prepared(prepared)? });
            }
        }
        self.calls += 1;
        for receipt in &self.receipts {
            engine.wait(*receipt)?;
        }
        Ok(())
    }
}
