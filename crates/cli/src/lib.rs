//! The `deuteron` command as a library, so that a wheel's script and the program are the same.
//!
//! | module | one sentence |
//! |---|---|
//! | `settings`, `values` | what can be set, where a value comes from, and what its text means |
//! | `run` | `deuteron run` |
//! | `output`, `terminal` | what the user sees |
//! | `signals` | Ctrl-C, Ctrl-Z and their like |
//! | `status`, `error` | exit codes, the status file, and what went wrong |
//! | `doctor` | `deuteron doctor` |
//! | `report` | `deuteron report` |
//! | `bench` | `deuteron bench` |
//! | `embedded` | the same job and the same look for another program |

mod bench;
mod doctor;
pub mod embedded;
mod error;
mod output;
mod report;
mod run;
mod settings;
mod signals;
mod status;
mod terminal;
mod values;

use clap::{Arg, ArgAction, Command, builder::ValueParser, error::ErrorKind};
use run::Here;
use status::exit;
use std::{
    env,
    ffi::OsString,
    io::{self, Write as _},
    path::PathBuf,
    thread,
};

const EXAMPLES: &str = "\
Examples:
  deuteron run -n 4 -- python train.py --epochs 10
  deuteron run --hosts node1:4,node2:4 --restarts 3 -- python train.py
  deuteron run -n 2 --accelerator /gpu/h200 --optional -- python train.py
  deuteron run --config train.toml -- python train.py

Every option is also an environment variable (DEUTERON_RESTARTS) and a key of the
file that --config names (restarts); docs/settings.md lists them. Exit code: the
failing task's, 128 + n for signal n; 75 if the gang did not assemble; 64 for bad
usage, 78 for bad configuration; --status-file says more.";

/// Runs the command with these arguments, the first being the program's own name, and returns its exit code.
///
/// ```
/// assert_eq!(deuteron_cli::main(["deuteron", "--version"].map(Into::into)), 0);
/// assert_eq!(deuteron_cli::main(["deuteron", "walk"].map(Into::into)), 64);
/// ```
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    main_of(vec![env::current_exe().unwrap_or_default().into()], arguments)
}

/// The same for a program that is started in another way: by an interpreter, say. `program` starts it again.
pub fn main_of(program: Vec<OsString>, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let status_file = env::var_os("DEUTERON_STATUS_FILE").map(PathBuf::from);
    if arguments.get(1).is_some_and(|word| word == "run") {
        let rest = arguments.split_off(2);
        match settings::from_horovod(rest) {
            Ok(rest) => arguments.extend(rest),
            Err(error) => return run::refuse(&error, status_file.as_deref()),
        }
    }
    let matches = match command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
                _ => {
                    if let Some(path) = status_file {
                        let text = error.render().to_string();
                        let error = error::Error::Usage(text.trim_end().into());
                        let _ = status::Status::invalid(&error).write(&path);
                    }
                    exit::USAGE
                }
            };
        }
    };
    match matches.subcommand() {
        Some(("run", matches)) => {
            log_warnings();
            run::run(matches, &here(program))
        }
        Some(("bench", matches)) => {
            log_warnings();
            bench::bench(matches, &here(program))
        }
        Some((bench::TASK, matches)) => {
            log_warnings();
            bench::task(matches)
        }
        Some(("agent", _)) => agent(),
        Some(("doctor", matches)) => match matches.get_one::<std::net::SocketAddr>("peer") {
            Some(address) => doctor::peer(*address),
            None => doctor::doctor(matches.get_flag("json"), &program),
        },
        Some(("report", matches)) => report::report(matches.get_one::<u32>("process").copied()),
        Some(("completions", matches)) => {
            let shell = matches.get_one::<clap_complete::Shell>("shell").copied();
            shell.map_or(exit::USAGE, |shell| print(&completions(shell)))
        }
        Some(("settings", _)) => print(settings::page().as_bytes()),
        _ => exit::USAGE,
    }
}

fn command() -> Command {
    let run = Command::new("run")
        .about("Start tasks together, on this machine or on many; they fail together and restart together")
        .override_usage("deuteron run [OPTIONS] [--] PROGRAM [ARGUMENT]...")
        .after_help(EXAMPLES)
        .args(settings::arguments())
        .arg(
            Arg::new("command")
                .value_name("PROGRAM")
                .help("What every task runs, and its arguments")
                .value_parser(ValueParser::os_string())
                .value_hint(clap::ValueHint::CommandWithArguments)
                .num_args(1..)
                .trailing_var_arg(true)
                .required(true),
        );
    let agent = Command::new("agent")
        .about("Serve a supervisor that sends an invitation on standard input")
        .hide(true);
    let doctor = Command::new("doctor")
        .about("Look at this machine, and say what is wrong and how to mend it")
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the findings as JSON"),
        )
        .arg(
            Arg::new("peer")
                .long("peer")
                .hide(true)
                .value_parser(clap::value_parser!(std::net::SocketAddr)),
        );
    let report = Command::new("report")
        .about(
            "Say which operations of a running job wait for which ranks, and what these are doing",
        )
        .after_help("Run it on any host of the job. Signal USR2 makes a rank log the same.")
        .arg(
            Arg::new("process")
                .value_name("PROCESS")
                .help("The process number of a rank; by default every rank on this machine")
                .value_parser(clap::value_parser!(u32)),
        );
    let completions = Command::new("completions")
        .about("Print the completions of a shell")
        .after_help("For bash: deuteron completions bash > ~/.local/share/bash-completion/completions/deuteron")
        .arg(
            Arg::new("shell")
                .value_name("SHELL")
                .required(true)
                .value_parser(clap::value_parser!(clap_complete::Shell)),
        );
    let settings = Command::new("settings").about("Print docs/settings.md").hide(true);
    Command::new("deuteron")
        .about("Process data, train on it in parallel, and predict with the model, in one place")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands([run, report, doctor, completions, agent, settings])
        .subcommands(bench::commands())
}

fn here(program: Vec<OsString>) -> Here {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let unbuffered = env::var_os("PYTHONUNBUFFERED").is_some();
    Here { cores, program, path, unbuffered }
}

/// What the libraries warn of (a stranger was refused, say) goes to standard error.
fn log_warnings() {
    // In a program that has a log already, it goes there.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(io::stderr)
        .with_target(false)
        .without_time()
        .try_init();
}

fn agent() -> u8 {
    log_warnings();
    match deuteron_gang::agent::serve_stdin() {
        Ok(()) => 0,
        Err(error) => {
            // It goes to the supervisor, which says whose it is.
            let _ = writeln!(io::stderr().lock(), "{error}");
            exit::FAILED
        }
    }
}

fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(), "deuteron", &mut text);
    text
}

fn print(text: &[u8]) -> u8 {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => 0,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            status::signal_code(signal_hook::consts::SIGPIPE)
        }
        Err(_) => exit::OUTPUT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(words: &[&str]) -> u8 {
        main(["deuteron"].iter().chain(words).map(OsString::from))
    }

    #[test]
    fn usage_and_help() {
        command().debug_assert();
        assert_eq!(code(&["--help"]), 0);
        assert_eq!(code(&["run", "--help"]), 0);
        assert_eq!(code(&["--version"]), 0);
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh] {
            let text = String::from_utf8(completions(shell)).unwrap();
            assert!(text.contains("--start-timeout"));
        }
        for words in [
            &[][..],
            &["walk"],
            &["run"],
            &["run", "--no-such", "true"],
            &["run", "-n", "0", "true"],
        ] {
            assert_eq!(code(words), 64, "{words:?}");
        }
        assert_eq!(code(&["run", "--config", "/nowhere.toml", "true"]), 78);
    }

    #[test]
    fn a_usage_error_reaches_the_status_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.json");
        assert_eq!(
            code(&["run", "--status-file", path.to_str().unwrap(), "-n", "9", "-H", "a:1", "x"]),
            64
        );
        let text = std::fs::read_to_string(path).unwrap();
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(status["outcome"], "invalid");
        assert_eq!(status["exit_code"], 64);
    }
}
