//! One rank of the benchmark: our side and the limits it is measured against.
//!
//! ```text
//! deuteron-bench registered|plain|raw|named|many|many-named|many-plain|many-traced|waiting [--tls DIR] [--flat] OUT RANK RANKS ADDRESS BLOCK...
//! deuteron-bench loop OUT RANK RANKS DESCRIPTOR BLOCK...
//! deuteron-bench identity DIR
//! ```
//!
//! A block is `type:bytes:calls:warmups`. Every rank writes `OUT.RANK`, one line a block:
//! `type bytes nanoseconds...`. A wrong result ends the run. `run.py` starts the ranks.

mod bare_loop;
mod engine;
mod identity;
mod measure;
mod ours;
mod raw;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use engine::Way;
use measure::{Failure, Job};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nothing is left to tell it to if stderr is closed; the exit code still says it.
            let _ = writeln!(std::io::stderr(), "deuteron-bench: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.is_empty() {
        return Err("which mode? registered, plain, raw, loop or identity".into());
    }
    let mode = arguments.remove(0);
    let tls = match arguments.iter().position(|argument| argument == "--tls") {
        Some(at) if at + 1 < arguments.len() => {
            let directory = PathBuf::from(arguments.remove(at + 1));
            arguments.remove(at);
            Some(directory)
        }
        Some(_) => return Err("--tls needs the folder that `identity` wrote".into()),
        None => None,
    };
    let flat = arguments.iter().position(|argument| argument == "--flat");
    if let Some(at) = flat {
        arguments.remove(at);
    }
    if mode == "identity" {
        let directory = arguments.first().ok_or("identity needs a folder")?;
        return identity::write(directory.as_ref());
    }
    let job = Job::parse(&arguments)?;
    match mode.as_str() {
        "registered" => ours::run(&job, tls.as_deref(), true, flat.is_some()),
        "plain" => ours::run(&job, tls.as_deref(), false, flat.is_some()),
        "named" | "many" | "many-named" | "many-plain" | "many-traced" | "waiting" => {
            let way = match mode.as_str() {
                "named" => Way::Named,
                "many" => Way::Many,
                "many-named" => Way::ManyNamed,
                "many-plain" => Way::ManyPlain,
                "many-traced" => Way::ManyTraced,
                _ => Way::Waiting,
            };
            let [group, barriers] = ours::connect(&job, tls.as_deref(), flat.is_some())?;
            engine::run(&job, group, barriers, way)
        }
        "raw" => raw::run(&job, tls.as_deref()),
        "loop" => bare_loop::run(&job),
        other => Err(format!("no mode is called {other}").into()),
    }
}
