//! `deuteron report`: what the ranks of a running job wait for.

use crate::status::exit;
use deuteron_collective::DESK;
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write as _},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    time::Duration,
};

/// How long a process may take to answer: its ranks ask each other first.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Longest answer that is read.
const MOST: u64 = 16 << 20;

/// Asks one process, or every one of this machine that has ranks, and prints who says what.
pub(crate) fn report(process: Option<u32>) -> u8 {
    let processes = process.map_or_else(
        || processes(&fs::read_to_string("/proc/net/unix").unwrap_or_default()),
        |one| vec![one],
    );
    let mut said: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut failed = false;
    for process in &processes {
        match ask(*process) {
            Ok(answer) => {
                for (who, text) in parse(&answer) {
                    said.entry(text.to_owned())
                        .or_default()
                        .push(format!("{who} (process {process})"));
                }
            }
            Err(error) => {
                failed = true;
                let _ =
                    writeln!(io::stderr(), "deuteron: process {process} does not answer: {error}");
            }
        }
    }
    if said.is_empty() && !failed {
        let _ = writeln!(
            io::stderr(),
            "deuteron: no process here has ranks with an engine; run this on a host of the job, as the job's user"
        );
        return exit::FAILED;
    }
    let mut text = String::new();
    for (report, who) in &said {
        text.push_str(&format!("{}:\n", who.join(", ")));
        report.lines().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    let printed = crate::print(text.as_bytes());
    if failed { exit::FAILED } else { printed }
}

/// The processes whose desks are in a listing of Unix sockets.
fn processes(listing: &str) -> Vec<u32> {
    let desk = |line: &str| line.rsplit_once('@')?.1.strip_prefix(DESK)?.parse().ok();
    let mut processes: Vec<u32> = listing.lines().filter_map(desk).collect();
    processes.sort_unstable();
    processes.dedup();
    processes
}

fn ask(process: u32) -> io::Result<String> {
    let address = SocketAddr::from_abstract_name(format!("{DESK}{process}"))?;
    let stream = UnixStream::connect_addr(&address).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => io::Error::other(
            "it has ended, or has no engine; without a number all that have one are asked",
        ),
        _ => error,
    })?;
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    let mut answer = Vec::new();
    stream.take(MOST).read_to_end(&mut answer)?;
    if answer.is_empty() {
        return Err(io::Error::other("it has no engine any more, or runs as another user"));
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Who says what.
fn parse(answer: &str) -> impl Iterator<Item = (&str, &str)> {
    answer.split_terminator('\0').filter_map(|one| one.split_once('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn desks_are_found_and_answers_taken_apart() {
        let listing = "Num RefCount Protocol Flags Type St Inode Path\n\
            0000: 00000002 00000000 00010000 0001 01 42 @deuteron-report-17\n\
            0000: 00000003 00000000 00000000 0001 03 43 @deuteron-report-17\n\
            0000: 00000002 00000000 00010000 0001 01 44 @deuteron-report-x\n\
            0000: 00000002 00000000 00010000 0001 01 45 /run/other";
        assert_eq!(processes(listing), [17]);
        let answers: Vec<(&str, &str)> =
            parse("rank 0 on a, one of 2\nnothing\nwaits\0rank 1 on a, one of 2\nx\0").collect();
        assert_eq!(
            answers,
            [("rank 0 on a, one of 2", "nothing\nwaits"), ("rank 1 on a, one of 2", "x")]
        );
    }

    #[test]
    fn a_process_that_does_not_answer_is_a_failure() {
        assert_eq!(report(Some(u32::MAX)), exit::FAILED);
    }
}
