//! The timeline: what every rank did when, in one file that Chrome's tracing page and Perfetto show.
//!
//! Ranks send their stretches of time to the lowest, which writes them on a thread of its own. The file is a JSON
//! array that is left open, which both viewers accept: whatever happens to the job, what was written can be read.

use super::message::{Event, Phase};
use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::PathBuf,
    sync::mpsc::{Sender, channel},
    thread::JoinHandle,
};

pub(super) struct Timeline {
    /// What has to be added to a rank's clock to make it this rank's.
    offsets: Vec<Option<i64>>,
    ended: Vec<bool>,
    to_writer: Option<Sender<Batch>>,
    writer: Option<JoinHandle<()>>,
}

struct Batch {
    rank: usize,
    offset: i64,
    events: Vec<Event>,
}

impl Timeline {
    /// Opens the file and names the ranks; a file that cannot be written is logged, and nothing is recorded.
    pub fn start(
        path: PathBuf,
        hosts: Vec<String>,
        near: Vec<bool>,
        called: Vec<usize>,
    ) -> Option<Self> {
        let failed =
            |error: &io::Error| tracing::warn!("no timeline in {}: {error}", path.display());
        let file = File::create(&path).inspect_err(failed).ok()?;
        let mut writer = BufWriter::new(file);
        let ended = vec![false; hosts.len()];
        let named = writer.write_all(b"[\n").and_then(|()| {
            called
                .iter()
                .zip(&hosts)
                .try_for_each(|(rank, host)| name_rank(&mut writer, *rank, host))
        });
        named.inspect_err(failed).ok()?;
        let (to_writer, batches) = channel::<Batch>();
        let spawned =
            std::thread::Builder::new().name("deuteron-timeline".into()).spawn(move || {
                for batch in batches {
                    let written = batch
                        .events
                        .iter()
                        .try_for_each(|event| {
                            write_event(&mut writer, called[batch.rank], batch.offset, event)
                        })
                        .and_then(|()| writer.flush());
                    if let Err(error) = written {
                        tracing::warn!("the timeline in {} ends here: {error}", path.display());
                        return;
                    }
                }
                let last = br#"{"ph":"M","pid":0,"name":"process_labels","args":{"labels":""}}]"#;
                let _ = writer.write_all(last).and_then(|()| writer.flush());
            });
        let writer = spawned.inspect_err(|error| tracing::warn!("no timeline: {error}")).ok()?;
        // Ranks of this host have the same clock.
        let offsets = near.into_iter().map(|near| near.then_some(0)).collect();
        Some(Self { offsets, ended, to_writer: Some(to_writer), writer: Some(writer) })
    }

    /// Takes a rank's events. Of another host's clock the smallest difference seen counts: the message took least.
    pub fn take(&mut self, rank: usize, events: Vec<Event>, sent: u64, arrived: u64, more: bool) {
        let offset = self.offsets[rank].get_or_insert(i64::MAX);
        if *offset != 0 {
            *offset = (*offset).min(arrived as i64 - sent as i64);
        }
        let batch = Batch { rank, offset: *offset, events };
        if let Some(writer) = &self.to_writer {
            // A writer that has given up has said so.
            let _ = writer.send(batch);
        }
        self.ended[rank] |= !more;
    }

    /// A rank has left, and sends nothing more.
    pub fn has_left(&mut self, rank: usize) {
        self.ended[rank] = true;
    }

    /// Whether every rank has sent its last events.
    pub fn is_complete(&self) -> bool {
        self.ended.iter().all(|ended| *ended)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.to_writer = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn name_rank(file: &mut impl Write, rank: usize, host: &str) -> io::Result<()> {
    let name = escape(&format!("rank {rank} on {host}"));
    writeln!(
        file,
        r#"{{"ph":"M","pid":{rank},"name":"process_name","args":{{"name":"{name}"}}}},"#
    )?;
    writeln!(
        file,
        r#"{{"ph":"M","pid":{rank},"name":"process_sort_index","args":{{"sort_index":{rank}}}}},"#
    )?;
    writeln!(
        file,
        r#"{{"ph":"M","pid":{rank},"tid":0,"name":"thread_name","args":{{"name":"engine"}}}},"#
    )
}

/// Runs lie on the engine's track; negotiations and waits overlap, so each has one of its own.
fn write_event(file: &mut impl Write, rank: usize, offset: i64, event: &Event) -> io::Result<()> {
    let Event { phase, name, start, end, bytes, fused } = event;
    let (name, clock) = (escape(name), |time: &u64| (*time as i64 + offset) as f64 / 1000.0);
    let (start, end) = (clock(start), clock(end));
    match phase {
        Phase::Run => writeln!(
            file,
            r#"{{"ph":"X","pid":{rank},"tid":0,"name":"{name}","cat":"run","ts":{start:.3},"dur":{:.3},"args":{{"bytes":{bytes},"operations":{fused}}}}},"#,
            end - start
        ),
        Phase::Negotiate | Phase::Wait => {
            let kind = if *phase == Phase::Wait { "wait" } else { "negotiate" };
            let id = format!("{rank}.{kind}.{name}");
            writeln!(
                file,
                r#"{{"ph":"b","pid":{rank},"tid":0,"id":"{id}","name":"{name}","cat":"{kind}","ts":{start:.3},"args":{{"bytes":{bytes}}}}},"#
            )?;
            writeln!(
                file,
                r#"{{"ph":"e","pid":{rank},"tid":0,"id":"{id}","name":"{name}","cat":"{kind}","ts":{end:.3}}},"#
            )
        }
    }
}

/// A text as the inside of a JSON string.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '"' | '\\' => escaped.extend(['\\', letter]),
            letter if letter.is_control() => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    escaped
}
