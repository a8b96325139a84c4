//! `deuteron bench`: measures collective calls on any gang, and tells how each was carried out and why.
//!
//! The command starts a gang whose tasks are this same program with a hidden subcommand. The tasks measure together; rank
//! 0 says on standard output how far they are, and returns everything as JSON, which the command shows.

mod table;
mod task;

use crate::{
    error::Error,
    output::{Closed, Printer},
    run::{self, Here},
    settings::Settings,
    values,
};
use clap::{Arg, ArgAction, ArgMatches, Command, builder::ValueParser};
use deuteron_collective::DType;
use deuteron_gang::{Event, Stream};
use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

pub(crate) use task::task;

/// The hidden subcommand of the tasks.
pub(crate) const TASK: &str = "bench-task";

const SIZES: &str = "8,1KiB,32KiB,1MiB,16MiB";
/// More than this in one tensor is refused before anything starts.
const MOST: u64 = 8 << 30;

/// A call that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Barrier,
}

impl Operation {
    const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Broadcast,
        Self::Barrier,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        }
    }

    /// The bytes that the busiest link or core has to move for each byte of the tensor, whatever the algorithm.
    fn moved(self, ranks: usize) -> f64 {
        let (all, others) = (ranks as f64, ranks as f64 - 1.0);
        match self {
            Self::AllReduce => 2.0 * others / all,
            Self::AllGather => others,
            Self::ReduceScatter | Self::AllToAll => others / all,
            Self::Broadcast => {
                if ranks > 1 {
                    1.0
                } else {
                    0.0
                }
            }
            Self::Barrier => 0.0,
        }
    }
}

/// What is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wish {
    operations: Vec<Operation>,
    /// Bytes of one rank's tensor.
    sizes: Vec<usize>,
    dtype: DType,
}

impl Wish {
    fn of(matches: &ArgMatches) -> Result<Self, Error> {
        let words = |name: &str| -> Vec<String> {
            let texts = matches.get_many::<String>(name).into_iter().flatten();
            texts.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect()
        };
        let refuse = |flag: &str, text: &str, problem: &str| {
            Error::Usage(format!("--{flag} {text}: {problem}"))
        };
        let known = |names: Vec<&str>| format!("it is one of {}", names.join(", "));
        let dtype = words("dtype").concat();
        let types = || DType::ALL.into_iter().filter(|dtype| *dtype != DType::Bool);
        let dtype = types()
            .find(|known| known.name() == dtype)
            .ok_or_else(|| refuse("dtype", &dtype, &known(types().map(DType::name).collect())))?;
        let mut sizes = Vec::new();
        for text in words("sizes") {
            let bytes = values::bytes(&text).map_err(|problem| refuse("sizes", &text, &problem))?;
            let problem = if bytes == 0 {
                "it is nothing"
            } else if bytes > MOST {
                "it is more than 8 GiB"
            } else if !bytes.is_multiple_of(dtype.size() as u64) {
                &format!("{} has {} bytes, and this is no multiple", dtype.name(), dtype.size())
            } else {
                sizes.push(bytes as usize);
                continue;
            };
            return Err(refuse("sizes", &text, problem));
        }
        let mut operations = Vec::new();
        for text in words("operations") {
            let found = Operation::ALL.into_iter().find(|operation| operation.name() == text);
            operations.push(found.ok_or_else(|| {
                refuse("operations", &text, &known(Operation::ALL.map(Operation::name).to_vec()))
            })?);
        }
        if sizes.is_empty() || operations.is_empty() {
            return Err(Error::Usage("name at least one size and one operation".into()));
        }
        Ok(Self { operations, sizes, dtype })
    }

    /// The same as arguments of the tasks.
    fn arguments(&self) -> [OsString; 6] {
        let sizes: Vec<String> = self.sizes.iter().map(usize::to_string).collect();
        let operations: Vec<&str> = self.operations.iter().map(|one| one.name()).collect();
        [
            "--sizes".into(),
            sizes.join(",").into(),
            "--operations".into(),
            operations.join(",").into(),
            "--dtype".into(),
            self.dtype.name().into(),
        ]
    }
}

fn wishes() -> [Arg; 3] {
    const HEADING: &str = "What is measured";
    let list = |name: &'static str| {
        Arg::new(name)
            .long(name)
            .help_heading(HEADING)
            .action(ArgAction::Append)
            .value_delimiter(',')
            .value_parser(ValueParser::string())
    };
    [
        list("sizes")
            .value_name("SIZE,…")
            .default_value(SIZES)
            .help("Bytes of one rank's tensor, with or without a unit: 8,64KiB,1MB"),
        list("operations")
            .value_name("NAME,…")
            .default_value("all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,barrier")
            .help("Which calls"),
        Arg::new("dtype")
            .long("dtype")
            .help_heading(HEADING)
            .value_name("TYPE")
            .default_value("f32")
            .value_parser(ValueParser::string())
            .help("The type of the elements: f32, bf16, i64 …"),
    ]
}

const EXAMPLES: &str = "\
Examples:
  deuteron bench -n 4
  deuteron bench --hosts node1:4,node2:4 --operations all_reduce --sizes 1MiB,64MiB
  deuteron bench -n 2 --tuning measure --json > bench.json

Tasks are placed as with deuteron run. Times are those of the slowest rank. Bus
bandwidth is what the busiest link has to carry, whatever the algorithm: it can be
compared between operations and numbers of ranks.";

/// `bench` and the hidden subcommand of its tasks.
pub(crate) fn commands() -> [Command; 2] {
    [
        Command::new("bench")
            .about(
                "Measure collective calls on any gang, and tell how each was carried out and why",
            )
            .after_help(EXAMPLES)
            .args(wishes())
            .arg(
                Arg::new("json")
                    .long("json")
                    .help_heading("What is measured")
                    .action(ArgAction::SetTrue)
                    .help("Print everything as JSON"),
            )
            .args(crate::settings::arguments()),
        Command::new(TASK).about("One task of deuteron bench").hide(true).args(wishes()),
    ]
}

/// Runs the benchmark and shows it.
pub(crate) fn bench(matches: &ArgMatches, here: &Here) -> u8 {
    let variable = |name: &str| env::var_os(name);
    let settings = match Settings::resolve(matches, variable) {
        Ok(settings) => settings,
        Err(error) => {
            let status_file = variable("DEUTERON_STATUS_FILE").map(PathBuf::from);
            return run::refuse(&error, status_file.as_deref());
        }
    };
    let status_file = settings.path("status-file");
    let prepared = Wish::of(matches)
        .and_then(|wish| run::job(&settings, command(&settings, &wish, here), here));
    let job = match prepared {
        Ok(job) => job,
        Err(error) => return run::refuse(&error, status_file),
    };
    let finished = match run::supervise(job, None, &settings, show_progress) {
        Ok(finished) => finished,
        Err(error) => return run::no_terminal(&error),
    };
    let as_json = matches.get_flag("json");
    finished.conclude(status_file, |results| {
        let found = results.iter().flatten().find(|bytes| !bytes.is_empty());
        let found: serde_json::Value = serde_json::from_slice(found.map_or(&[], Vec::as_slice))?;
        Ok(if as_json { format!("{found:#}\n") } else { table::text(&found) })
    })
}

/// What every task runs: this program, or the one that `--agent` names.
fn command(settings: &Settings, wish: &Wish, here: &Here) -> Vec<OsString> {
    let agent: Vec<&str> =
        settings.text("agent").into_iter().flat_map(str::split_whitespace).collect();
    let program = match agent.split_last() {
        Some((&"agent", program)) if !program.is_empty() => {
            program.iter().map(OsString::from).collect()
        }
        _ => here.program.clone(),
    };
    program.into_iter().chain([TASK.into()]).chain(wish.arguments()).collect()
}

/// What rank 0 prints is how far it is; a terminal shows the last of it in one line.
fn show_progress(printer: &mut Printer, event: &Event) -> Option<Result<(), Closed>> {
    match event {
        Event::Output { rank: 0, stream: Stream::Stdout, lines } => {
            let text = String::from_utf8_lossy(lines);
            printer.progress(text.lines().last().unwrap_or_default());
            Some(Ok(()))
        }
        _ => None,
    }
}

/// Bytes in words.
fn sized(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 && bytes.is_multiple_of(1 << 30) => {
            format!("{} GiB", bytes >> 30)
        }
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => {
            format!("{} MiB", bytes >> 20)
        }
        bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => {
            format!("{} KiB", bytes >> 10)
        }
        bytes => format!("{bytes} B"),
    }
}

/// A path with `~` for the home folder.
fn homely(path: &Path) -> String {
    let home = env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    match home.and_then(|home| path.strip_prefix(home).ok().map(Path::to_owned)) {
        Some(rest) => format!("~/{}", rest.display()),
        None => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(words: &[&str]) -> Result<Wish, Error> {
        let matches = crate::command()
            .try_get_matches_from(["deuteron", "bench"].iter().chain(words))
            .map_err(|error| Error::Usage(error.to_string()))?;
        Wish::of(matches.subcommand().unwrap().1)
    }

    #[test]
    fn what_is_asked_for_reaches_the_tasks() {
        let asked = wish(&[
            "--sizes",
            "8,1KiB",
            "--sizes",
            "2MB",
            "--operations",
            "barrier",
            "--dtype",
            "f64",
        ]);
        let asked = asked.unwrap();
        assert_eq!(asked.sizes, [8, 1024, 2_000_000]);
        let words: Vec<OsString> =
            ["deuteron".into(), TASK.into()].into_iter().chain(asked.arguments()).collect();
        let matches = crate::command().try_get_matches_from(words).unwrap();
        assert_eq!(Wish::of(matches.subcommand().unwrap().1).unwrap(), asked);
        let usual = wish(&["-n", "2", "--json"]).unwrap();
        assert_eq!((usual.sizes.len(), usual.operations.len(), usual.dtype), (5, 6, DType::F32));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_a_sentence() {
        for (words, problem) in [
            (vec!["--sizes", "8,many"], "--sizes many: \"many\" is not a size"),
            (vec!["--sizes", "0"], "--sizes 0: it is nothing"),
            (vec!["--sizes", "9GiB"], "--sizes 9GiB: it is more than 8 GiB"),
            (vec!["--sizes", "6"], "--sizes 6: f32 has 4 bytes, and this is no multiple"),
            (vec!["--sizes", ","], "name at least one size"),
            (
                vec!["--operations", "all_reduce,jump"],
                "--operations jump: it is one of all_reduce,",
            ),
            (vec!["--dtype", "bool"], "--dtype bool: it is one of u8,"),
        ] {
            let error = wish(&words).unwrap_err();
            assert_eq!(error.exit_code(), 64);
            assert!(error.to_string().starts_with(problem), "{error}");
        }
        assert!(wish(&["train.py"]).is_err());
    }

    #[test]
    fn tasks_run_this_program_or_that_of_the_agent() {
        let of = |words: &[&str]| {
            let matches = crate::command()
                .try_get_matches_from(["deuteron", "bench"].iter().chain(words))
                .unwrap();
            let (_, matches) = matches.subcommand().unwrap();
            let settings = Settings::resolve(matches, |_| None).unwrap();
            let here = Here {
                cores: 2,
                program: vec!["/bin/deuteron".into()],
                path: "/bin".into(),
                unbuffered: false,
            };
            command(&settings, &Wish::of(matches).unwrap(), &here)
        };
        assert_eq!(of(&[])[..2], ["/bin/deuteron", TASK]);
        assert_eq!(of(&["--agent", "/opt/d agent"])[..2], ["/opt/d", TASK]);
        assert_eq!(of(&["--agent", "start-it"])[..2], ["/bin/deuteron", TASK]);
    }

    #[test]
    fn sizes_in_words() {
        for (bytes, text) in [(8, "8 B"), (1 << 10, "1 KiB"), (1500, "1500 B"), (3 << 20, "3 MiB")]
        {
            assert_eq!(sized(bytes), text);
        }
        assert_eq!(sized(1 << 30), "1 GiB");
    }
}
