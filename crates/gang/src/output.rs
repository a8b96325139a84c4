//! A task's output on its way to the supervisor: whole lines, in pieces, for credit; the last ones are kept.

use crate::{Stream, protocol::PIECE};
use std::{
    collections::VecDeque,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::{Semaphore, watch},
};

/// Lines and bytes that are kept for the error message of a task that fails.
const LAST_LINES: usize = 20;
const LAST_BYTES: usize = 4 << 10;
/// How long a stream may be quiet after its process has ended.
const MOMENT: Duration = Duration::from_millis(200);

/// The last lines of both streams of a task.
#[derive(Clone, Default)]
pub(crate) struct Last(Arc<Mutex<[VecDeque<String>; 2]>>);

impl Last {
    fn add(&self, stream: Stream, lines: &[u8]) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = &mut last[stream as usize];
        let text = String::from_utf8_lossy(&lines[lines.len().saturating_sub(LAST_BYTES)..]);
        kept.extend(text.lines().map(str::to_owned));
        while kept.len() > LAST_LINES || kept.iter().map(String::len).sum::<usize>() > LAST_BYTES {
            kept.pop_front();
        }
    }

    /// What it said last on its standard error, or if it said nothing there, on its standard output.
    pub fn text(&self) -> String {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [stdout, stderr] = &*last;
        let lines = if stderr.is_empty() { stdout } else { stderr };
        Vec::from_iter(lines.iter().map(String::as_str)).join("\n")
    }
}

/// Reads a stream to its end, or until the process is over and nothing has come for a moment (a process that it left behind
/// may hold the stream open), and hands on whole lines as soon as they are there. A carriage return ends a line too (a
/// progress bar), and so does the length of a piece.
pub(crate) async fn forward<F: Future<Output = ()>>(
    mut from: impl AsyncRead + Unpin,
    stream: Stream,
    last: Last,
    credit: Arc<Semaphore>,
    mut over: watch::Receiver<bool>,
    mut send: impl FnMut(Vec<u8>) -> F,
) {
    let mut held: Vec<u8> = Vec::with_capacity(PIECE);
    loop {
        let room = (PIECE - held.len()) as u64;
        let quiet = async {
            // Without a sender there is nobody to say that the process is over.
            if over.wait_for(|over| *over).await.is_err() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(MOMENT).await;
        };
        let read = tokio::select! {
            biased;
            read = async { (&mut from).take(room).read_buf(&mut held).await } => read.unwrap_or(0),
            () = quiet => 0,
        };
        let ended = read == 0;
        let whole =
            held.iter().rposition(|byte| matches!(byte, b'\n' | b'\r')).map_or(0, |at| at + 1);
        let cut = if ended || (whole == 0 && held.len() == PIECE) { held.len() } else { whole };
        if cut > 0 {
            let rest = held.split_off(cut);
            let mut lines = std::mem::replace(&mut held, rest);
            held.reserve(PIECE - held.len());
            if lines.last() != Some(&b'\n') {
                if lines.last() == Some(&b'\r') {
                    lines.pop();
                }
                lines.push(b'\n');
            }
            last.add(stream, &lines);
            // A closed semaphore means that nobody listens any more: read on, so that the task is not blocked.
            if let Ok(permit) = credit.acquire_many(lines.len() as u32).await {
                permit.forget();
                send(lines).await;
            }
        }
        if ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines_of(input: &[u8]) -> (Vec<Vec<u8>>, String) {
        let (last, credit) = (Last::default(), Arc::new(Semaphore::new(1 << 20)));
        let mut sent = Vec::new();
        let over = watch::channel(true).1;
        forward(input, Stream::Stdout, last.clone(), credit, over, |lines| {
            sent.push(lines);
            std::future::ready(())
        })
        .await;
        (sent, last.text())
    }

    #[tokio::test]
    async fn lines_stay_whole_and_nothing_is_lost() {
        let long = [b"x".repeat(PIECE + 10), b"\nend".to_vec()].concat();
        let (sent, last) = lines_of(&long).await;
        assert!(sent.iter().all(|piece| piece.last() == Some(&b'\n') && piece.len() <= PIECE + 1));
        assert_eq!(sent.concat().iter().filter(|byte| **byte == b'x').count(), PIECE + 10);
        assert!(last.ends_with("\nend"));

        let (sent, last) = lines_of(b"one\r50%\r100%\ntwo\nthree").await;
        assert_eq!(sent.concat(), b"one\r50%\r100%\ntwo\nthree\n");
        assert!(last.ends_with("two\nthree"));
        assert_eq!(lines_of(b"").await.0, Vec::<Vec<u8>>::new());
    }
}
