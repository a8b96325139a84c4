//! The one registry of settings: every flag, environment variable, key of the file and alias of Horovod's comes from it.
//!
//! A flag wins over the environment, the environment over the file, the file over the default. Where a value came from
//! is kept, so that an error can say whom to mend.

use crate::{error::Error, values};
use clap::{Arg, ArgAction, ArgMatches, builder::ValueParser};
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fmt,
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// What a setting's text means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A whole number, at least this.
    Count(u64),
    /// See [`values::duration`].
    Duration,
    /// See [`values::bytes`].
    Bytes,
    Path,
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// On or off.
    Flag,
    /// Texts between commas; the flag may be repeated.
    List,
    /// One text each time the flag is given.
    Texts,
    /// `NAME=VALUE` each time the flag is given; a table in the file.
    Pairs,
}

/// One thing that can be set.
pub(crate) struct Setting {
    /// Key in the file; in capitals and after `DEUTERON_`, the environment variable.
    pub name: &'static str,
    /// Long flag, without dashes.
    pub flag: &'static str,
    pub short: Option<char>,
    pub kind: Kind,
    /// What help calls its value.
    pub value: &'static str,
    pub default: Option<&'static str>,
    /// Whether there is an environment variable.
    pub environment: bool,
    /// Whether there is a key in the file.
    pub file: bool,
    /// Horovod's flags for it, with dashes.
    pub horovod_flags: &'static [&'static str],
    /// Horovod's environment variable for it.
    pub horovod_environment: Option<&'static str>,
    pub group: &'static str,
    /// One sentence.
    pub help: &'static str,
}

const PLAIN: Setting = Setting {
    name: "",
    flag: "",
    short: None,
    kind: Kind::Text,
    value: "TEXT",
    default: None,
    environment: true,
    file: true,
    horovod_flags: &[],
    horovod_environment: None,
    group: "",
    help: "",
};

const PLACE: &str = "Tasks and hosts";
const ACCELERATORS: &str = "Accelerators";
const FAILURE: &str = "Failure";
const OUTPUT: &str = "Output";
const NETWORK: &str = "Network";
const SPEED: &str = "Speed";
const FILE: &str = "Settings";

/// All settings, in the order of the help.
pub(crate) static SETTINGS: &[Setting] = &[
    Setting {
        name: "tasks",
        flag: "tasks",
        short: Some('n'),
        kind: Kind::Count(1),
        value: "COUNT",
        horovod_flags: &["-np", "--num-proc"],
        group: PLACE,
        help: "How many tasks to start; if not set, one for each slot of the hosts.",
        ..PLAIN
    },
    Setting {
        name: "hosts",
        flag: "hosts",
        short: Some('H'),
        kind: Kind::List,
        value: "HOST:SLOTS,…",
        horovod_flags: &["-H", "--hosts"],
        group: PLACE,
        help: "Where tasks run, in the order that ranks follow; if not set, on this machine, with a slot for each task or, \
               without --tasks, for each core.",
        ..PLAIN
    },
    Setting {
        name: "hostfile",
        flag: "hostfile",
        kind: Kind::Path,
        value: "FILE",
        horovod_flags: &["-hostfile", "--hostfile"],
        group: PLACE,
        help: "The hosts in a file instead, one on a line: `node1 slots=4` or `node1:4`; # starts a comment.",
        ..PLAIN
    },
    Setting {
        name: "env",
        flag: "env",
        kind: Kind::Pairs,
        value: "NAME=VALUE",
        environment: false,
        group: PLACE,
        help: "Set an environment variable in every task; may be repeated.",
        ..PLAIN
    },
    Setting {
        name: "accelerator",
        flag: "accelerator",
        value: "PATH",
        group: ACCELERATORS,
        help: "What kind of accelerator each task gets: /gpu, /gpu/h200 or /gpu/*.",
        ..PLAIN
    },
    Setting {
        name: "accelerators-per-task",
        flag: "per-task",
        kind: Kind::Count(1),
        value: "COUNT",
        default: Some("1"),
        group: ACCELERATORS,
        help: "How many of them each task gets.",
        ..PLAIN
    },
    Setting {
        name: "accelerator-memory",
        flag: "memory",
        kind: Kind::Bytes,
        value: "BYTES",
        default: Some("0"),
        group: ACCELERATORS,
        help: "The least memory that each of them must have.",
        ..PLAIN
    },
    Setting {
        name: "accelerator-optional",
        flag: "optional",
        kind: Kind::Flag,
        group: ACCELERATORS,
        help: "Run without accelerators where there are not enough, and say so.",
        ..PLAIN
    },
    Setting {
        name: "discovery-script",
        flag: "discovery-script",
        kind: Kind::Path,
        value: "PROGRAM",
        group: ACCELERATORS,
        help: "Ask this program on every host for its accelerators, as Spark does, instead of NVML.",
        ..PLAIN
    },
    Setting {
        name: "restarts",
        flag: "restarts",
        kind: Kind::Count(0),
        value: "COUNT",
        default: Some("0"),
        horovod_flags: &["--reset-limit"],
        group: FAILURE,
        help: "How often the whole gang is started again after a task has failed.",
        ..PLAIN
    },
    Setting {
        name: "start-timeout",
        flag: "start-timeout",
        kind: Kind::Duration,
        value: "TIME",
        default: Some("60s"),
        horovod_flags: &["--start-timeout"],
        horovod_environment: Some("HOROVOD_START_TIMEOUT"),
        group: FAILURE,
        help: "How long the gang may take to assemble before the job is given up.",
        ..PLAIN
    },
    Setting {
        name: "grace",
        flag: "grace",
        kind: Kind::Duration,
        value: "TIME",
        default: Some("5s"),
        group: FAILURE,
        help: "How long a task that has been told to end (SIGTERM) may take before it is killed.",
        ..PLAIN
    },
    Setting {
        name: "output",
        flag: "output",
        kind: Kind::Path,
        value: "FOLDER",
        horovod_flags: &["--output-filename"],
        group: OUTPUT,
        help: "Also write what each task prints to FOLDER/rank.N/stdout and FOLDER/rank.N/stderr.",
        ..PLAIN
    },
    Setting {
        name: "timestamps",
        flag: "timestamps",
        kind: Kind::Flag,
        horovod_flags: &["-prefix-timestamp", "--prefix-output-with-timestamp"],
        group: OUTPUT,
        help: "Put the time (UTC) before every line.",
        ..PLAIN
    },
    Setting {
        name: "status-file",
        flag: "status-file",
        kind: Kind::Path,
        value: "FILE",
        group: OUTPUT,
        help: "Write how the job ended, and why, to this file as JSON.",
        ..PLAIN
    },
    Setting {
        name: "quiet",
        flag: "quiet",
        short: Some('q'),
        kind: Kind::Flag,
        group: OUTPUT,
        help: "Say nothing but what tasks print and what went wrong.",
        ..PLAIN
    },
    Setting {
        name: "verbose",
        flag: "verbose",
        short: Some('v'),
        kind: Kind::Flag,
        horovod_flags: &["--verbose"],
        group: OUTPUT,
        help: "Say where each setting came from and where each task runs.",
        ..PLAIN
    },
    Setting {
        name: "interface",
        flag: "interface",
        value: "NAME",
        horovod_flags: &["--network-interface", "--network-interfaces"],
        horovod_environment: Some("HOROVOD_GLOO_IFACE"),
        group: NETWORK,
        help: "The interface or address at which other hosts reach this one; if not set, the one on the route to them.",
        ..PLAIN
    },
    Setting {
        name: "ssh-port",
        flag: "ssh-port",
        short: Some('p'),
        kind: Kind::Count(1),
        value: "PORT",
        horovod_flags: &["-p", "--ssh-port"],
        group: NETWORK,
        help: "The port of the hosts' ssh servers, if ssh's own configuration does not say.",
        ..PLAIN
    },
    Setting {
        name: "ssh-identity-file",
        flag: "ssh-identity-file",
        short: Some('i'),
        kind: Kind::Path,
        value: "FILE",
        horovod_flags: &["-i", "--ssh-identity-file"],
        group: NETWORK,
        help: "The private key that ssh uses, if its own configuration does not say.",
        ..PLAIN
    },
    Setting {
        name: "ssh-option",
        flag: "ssh-option",
        kind: Kind::Texts,
        value: "NAME=VALUE",
        environment: false,
        group: NETWORK,
        help: "One more `-o` for ssh; may be repeated.",
        ..PLAIN
    },
    Setting {
        name: "agent",
        flag: "agent",
        value: "COMMAND",
        group: NETWORK,
        help: "The command, words between spaces, that starts an agent on a host; if not set, this program at this path.",
        ..PLAIN
    },
    Setting {
        name: "tuning",
        flag: "tuning",
        kind: Kind::Choice(&["auto", "off", "measure"]),
        value: "WORD",
        default: Some("auto"),
        group: SPEED,
        help: "Where tasks' groups take their thresholds from: measured on this kind of machine once and kept in \
               ~/.cache/deuteron (auto), the same everywhere (off), or measured at each start (measure).",
        ..PLAIN
    },
    Setting {
        name: "bucket-size",
        flag: "bucket-size",
        kind: Kind::Bytes,
        value: "SIZE",
        default: Some("8MiB"),
        group: SPEED,
        help: "The most that tasks' engines fuse into one reduction.",
        ..PLAIN
    },
    Setting {
        name: "deterministic",
        flag: "deterministic",
        kind: Kind::Flag,
        group: SPEED,
        help: "What is fused depends on names and sizes only, so that results are the same in every run, bit by bit.",
        ..PLAIN
    },
    Setting {
        name: "stall-report",
        flag: "stall-report",
        kind: Kind::Duration,
        value: "TIME",
        default: Some("60s"),
        horovod_flags: &["--stall-check-warning-time-seconds"],
        horovod_environment: Some("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        group: FAILURE,
        help: "How long an operation waits for a rank before tasks' engines log who waits for whom.",
        ..PLAIN
    },
    Setting {
        name: "timeline",
        flag: "timeline",
        kind: Kind::Path,
        value: "FILE",
        horovod_flags: &["--timeline-filename"],
        horovod_environment: Some("HOROVOD_TIMELINE"),
        group: OUTPUT,
        help: "Record what every rank's engine does in this file, on rank 0's host, for Perfetto or Chrome's tracing page.",
        ..PLAIN
    },
    Setting {
        name: "config",
        flag: "config",
        kind: Kind::Path,
        value: "FILE",
        file: false,
        horovod_flags: &["--config-file"],
        group: FILE,
        help: "Read settings from this TOML file.",
        ..PLAIN
    },
];

/// Flags of `horovodrun` that have no counterpart, and why.
static LEFT_OUT: &[(&[&str], &str)] = &[
    (&["--gloo", "--mpi", "--jsrun"], "there is one controller"),
    (&["--mpi-args", "--mpi-threads-disable", "--tcp", "--binding-args"], "MPI is not used"),
    (
        &["--cycle-time-ms", "--fusion-threshold-mb", "--cache-capacity", "--autotune"],
        "operations start and are fused as they become ready, there is no cycle to tune",
    ),
    (
        &["--no-stall-check", "--stall-check-shutdown-time-seconds"],
        "a stall is reported, and a lost rank ends the job",
    ),
    (&["--timeline-mark-cycles"], "there are no cycles"),
    (&["--log-level", "--log-without-timestamp"], "--quiet, --verbose and --timestamps are there"),
    (
        &["--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds"],
        "what a task needs is set with --env",
    ),
    (
        &["--disable-cache", "-cb", "--check-build"],
        "there is no cache of responses; see `deuteron doctor`",
    ),
    (
        &["--host-discovery-script", "--min-np", "--min-num-proc", "--max-np", "--max-num-proc"],
        "a gang has one size; a gang that fails starts again with --restarts",
    ),
    (
        &["--slots-per-host", "--elastic-timeout", "--blacklist-cooldown-range"],
        "a gang has one size; write slots in --hosts",
    ),
];

impl Setting {
    pub(crate) fn variable(&self) -> String {
        format!("DEUTERON_{}", self.name.to_ascii_uppercase().replace('-', "_"))
    }

    fn takes_value(&self) -> bool {
        self.kind != Kind::Flag
    }

    fn argument(&self) -> Arg {
        let repeats = matches!(self.kind, Kind::List | Kind::Texts | Kind::Pairs);
        let mut help = self.help.to_owned();
        if let Some(default) = self.default.filter(|default| *default != "0") {
            let _ = write!(help, " [default: {default}]");
        }
        let argument = Arg::new(self.name)
            .long(self.flag)
            .help(help)
            .help_heading(self.group)
            .action(if repeats { ArgAction::Append } else { ArgAction::Set })
            .aliases(self.long_aliases());
        let argument = match self.short {
            Some(short) => argument.short(short),
            None => argument,
        };
        let argument = match self.kind {
            Kind::Path => argument.value_hint(clap::ValueHint::AnyPath),
            _ => argument,
        };
        if self.takes_value() {
            argument.value_name(self.value).value_parser(ValueParser::os_string())
        } else {
            argument.action(ArgAction::SetTrue).overrides_with(self.opposite())
        }
    }

    /// What turns a switch off that the environment or the file has turned on.
    fn opposite_argument(&self) -> Option<Arg> {
        let argument = Arg::new(self.opposite()).long(self.opposite()).hide(true);
        (!self.takes_value()).then(|| argument.action(ArgAction::SetTrue).overrides_with(self.name))
    }

    fn opposite(&self) -> String {
        format!("no-{}", self.flag)
    }

    /// Long flags of Horovod's that are spelled differently.
    fn long_aliases(&self) -> Vec<&'static str> {
        let long = self.horovod_flags.iter().filter_map(|flag| flag.strip_prefix("--"));
        long.filter(|flag| *flag != self.flag).collect()
    }
}

/// The arguments of `deuteron run`, without the tasks' command.
pub(crate) fn arguments() -> impl Iterator<Item = Arg> {
    SETTINGS
        .iter()
        .flat_map(|setting| [Some(setting.argument()), setting.opposite_argument()])
        .flatten()
}

/// Rewrites Horovod's long flags with one dash, which no other parser knows, up to where the tasks' command begins.
/// Refuses those without a counterpart, with the reason.
pub(crate) fn from_horovod(arguments: Vec<OsString>) -> Result<Vec<OsString>, Error> {
    let mut result = Vec::with_capacity(arguments.len());
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        let Some(text) = argument.to_str().filter(|text| text.starts_with('-') && *text != "--")
        else {
            result.push(argument);
            break;
        };
        let (flag, attached) = match text.split_once('=') {
            Some((flag, _)) => (flag, true),
            None => (text, false),
        };
        if let Some((_, why)) = LEFT_OUT.iter().find(|(flags, _)| flags.contains(&flag)) {
            return Err(Error::Usage(format!(
                "{flag} of horovodrun has no counterpart, leave it out: {why}"
            )));
        }
        let setting = SETTINGS.iter().find(|setting| {
            setting.horovod_flags.contains(&flag)
                || flag.strip_prefix("--").is_some_and(|long| long == setting.flag)
                || setting.short.is_some_and(|short| flag == format!("-{short}"))
        });
        match setting {
            Some(setting) if !flag.starts_with("--") && flag.len() > 2 => {
                result.push(text.replacen(flag, &format!("--{}", setting.flag), 1).into());
            }
            _ => result.push(argument),
        }
        if setting.is_some_and(|setting| setting.takes_value() && !attached) {
            result.extend(rest.next());
        }
    }
    result.extend(rest);
    Ok(result)
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Flag(String),
    Environment(String),
    File(PathBuf, String),
    Default,
}

impl Origin {
    fn precedence(&self) -> u8 {
        match self {
            Self::Flag(_) => 3,
            Self::Environment(_) => 2,
            Self::File(..) => 1,
            Self::Default => 0,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => f.write_str(flag),
            Self::Environment(variable) => f.write_str(variable),
            Self::File(path, key) => write!(f, "in {}: {key}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Count(u64),
    Duration(Duration),
    Bytes(u64),
    Path(PathBuf),
    Text(String),
    Flag(bool),
    Texts(Vec<String>),
    Pairs(Vec<(String, String)>),
}

#[derive(Clone, Debug)]
struct Given {
    value: Value,
    origin: Origin,
    text: String,
}

/// The value of every setting, and where it came from.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    given: BTreeMap<&'static str, Given>,
}

impl Settings {
    /// From the flags, the environment (asked through `variable`) and the file that one of them names.
    pub(crate) fn resolve(
        flags: &ArgMatches,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        let mut settings = Self::default();
        for setting in SETTINGS {
            if let Some(default) = setting.default {
                settings.put(setting, Origin::Default, &[default.into()])?;
            }
        }
        // The file is the weakest but one, yet what names it is stronger: so it is looked up first.
        for setting in SETTINGS.iter().filter(|setting| setting.name == "config") {
            settings.take(setting, flags, &variable)?;
        }
        if let Some(path) = settings.path("config") {
            let path = path.to_owned();
            settings.read(&path)?;
        }
        for setting in SETTINGS {
            settings.take(setting, flags, &variable)?;
        }
        settings.exclusive("hosts", "hostfile")?;
        settings.exclusive("quiet", "verbose")?;
        Ok(settings)
    }

    fn take(
        &mut self,
        setting: &'static Setting,
        flags: &ArgMatches,
        variable: &impl Fn(&str) -> Option<OsString>,
    ) -> Result<(), Error> {
        if setting.takes_value() {
            if let Some(texts) = flags.get_many::<OsString>(setting.name) {
                let texts: Vec<OsString> = texts.cloned().collect();
                return self.put(setting, Origin::Flag(format!("--{}", setting.flag)), &texts);
            }
        } else if flags.get_flag(setting.name) {
            return self.put(
                setting,
                Origin::Flag(format!("--{}", setting.flag)),
                &["true".into()],
            );
        } else if flags.get_flag(&setting.opposite()) {
            let origin = Origin::Flag(format!("--{}", setting.opposite()));
            return self.put(setting, origin, &["false".into()]);
        }
        let own = setting.environment.then(|| setting.variable());
        for name in own.into_iter().chain(setting.horovod_environment.map(str::to_owned)) {
            // An empty variable counts as unset: it is how many wrappers switch one off.
            if let Some(text) = variable(&name).filter(|text| !text.is_empty()) {
                return self.put(setting, Origin::Environment(name), &[text]);
            }
        }
        Ok(())
    }

    fn put(
        &mut self,
        setting: &'static Setting,
        origin: Origin,
        texts: &[OsString],
    ) -> Result<(), Error> {
        let shown: Vec<_> = texts.iter().map(|text| text.to_string_lossy()).collect();
        let shown = shown.join(",");
        let value =
            parse(setting.kind, texts).map_err(|problem| wrong(&origin, &shown, &problem))?;
        self.given.insert(setting.name, Given { value, origin, text: shown });
        Ok(())
    }

    fn read(&mut self, path: &Path) -> Result<(), Error> {
        let refuse =
            |problem: String| Error::Configuration(format!("in {}: {problem}", path.display()));
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            return Err(refuse(
                "this is a YAML file; write the settings as TOML, see docs/settings.md".into(),
            ));
        }
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::Configuration(format!("cannot read {}: {error}", path.display()))
        })?;
        let table: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| refuse(error.to_string().trim_end().into()))?;
        for (key, value) in table {
            let setting = SETTINGS
                .iter()
                .find(|setting| setting.file && setting.name == key)
                .ok_or_else(|| refuse(unknown(&key)))?;
            let value = convert(setting.kind, &value, path)
                .map_err(|problem| refuse(format!("{key} = {value}: {problem}")))?;
            let text = match &value {
                Value::Texts(texts) => texts.join(","),
                Value::Text(text) => text.clone(),
                Value::Path(path) => path.display().to_string(),
                Value::Count(count) | Value::Bytes(count) => count.to_string(),
                Value::Duration(duration) => format!("{}s", duration.as_secs_f64()),
                Value::Flag(on) => on.to_string(),
                Value::Pairs(pairs) => pairs
                    .iter()
                    .map(|(name, value)| format!("{name}={value}"))
                    .collect::<Vec<_>>()
                    .join(","),
            };
            self.given.insert(
                setting.name,
                Given { value, origin: Origin::File(path.into(), key), text },
            );
        }
        Ok(())
    }

    /// Of two that say the same thing in different ways, the stronger stays; equally strong ones contradict.
    fn exclusive(&mut self, one: &'static str, other: &'static str) -> Result<(), Error> {
        let strength = |name| {
            self.given
                .get(name)
                .filter(|given| given.value != Value::Flag(false))
                .map(|given| given.origin.precedence())
        };
        let (Some(first), Some(second)) = (strength(one), strength(other)) else {
            return Ok(());
        };
        match first.cmp(&second) {
            std::cmp::Ordering::Less => self.given.remove(one),
            std::cmp::Ordering::Greater => self.given.remove(other),
            std::cmp::Ordering::Equal => {
                return Err(
                    self.refuse(one, &format!("it contradicts {other}; set one of the two"))
                );
            }
        };
        Ok(())
    }

    /// The error that says that what was set for `name` cannot be.
    pub(crate) fn refuse(&self, name: &str, problem: &str) -> Error {
        match self.given.get(name) {
            Some(Given { value: Value::Flag(_), origin: Origin::Flag(flag), .. }) => {
                Error::Usage(format!("{flag}: {problem}"))
            }
            Some(given) => wrong(&given.origin, &given.text, problem),
            None => Error::Usage(problem.into()),
        }
    }

    /// Whether it was typed; what a file or the environment sets may be meant for other jobs.
    pub(crate) fn is_typed(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|given| matches!(given.origin, Origin::Flag(_)))
    }

    /// What was set, by whom, in the order of the registry.
    pub(crate) fn explained(&self) -> Vec<String> {
        let given =
            SETTINGS.iter().filter_map(|setting| Some((setting, self.given.get(setting.name)?)));
        let set = given.filter(|(_, given)| given.origin != Origin::Default);
        set.map(|(setting, given)| {
            let origin = match &given.origin {
                Origin::File(path, _) => path.display().to_string(),
                origin => origin.to_string(),
            };
            format!("{} = {} ({origin})", setting.name, given.text)
        })
        .collect()
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.given.get(name).map(|given| &given.value)
    }

    pub(crate) fn count(&self, name: &str) -> Option<u64> {
        match self.value(name) {
            Some(Value::Count(count) | Value::Bytes(count)) => Some(*count),
            _ => None,
        }
    }

    pub(crate) fn duration(&self, name: &str) -> Duration {
        match self.value(name) {
            Some(Value::Duration(duration)) => *duration,
            _ => Duration::ZERO,
        }
    }

    pub(crate) fn path(&self, name: &str) -> Option<&Path> {
        match self.value(name) {
            Some(Value::Path(path)) => Some(path),
            _ => None,
        }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.value(name) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.value(name) == Some(&Value::Flag(true))
    }

    pub(crate) fn texts(&self, name: &str) -> Option<&[String]> {
        match self.value(name) {
            Some(Value::Texts(texts)) => Some(texts),
            _ => None,
        }
    }

    pub(crate) fn pairs(&self, name: &str) -> Vec<(String, String)> {
        match self.value(name) {
            Some(Value::Pairs(pairs)) => pairs.clone(),
            _ => Vec::new(),
        }
    }
}

fn wrong(origin: &Origin, text: &str, problem: &str) -> Error {
    match origin {
        Origin::Flag(flag) => Error::Usage(format!("{flag} {text}: {problem}")),
        Origin::Environment(name) => Error::Configuration(format!("{name}={text}: {problem}")),
        Origin::File(..) => Error::Configuration(format!("{origin} = {text}: {problem}")),
        Origin::Default => Error::Usage(problem.into()),
    }
}

fn unknown(key: &str) -> String {
    let near = SETTINGS
        .iter()
        .filter(|setting| setting.file)
        .map(|setting| {
            let distance = strsim::damerau_levenshtein(setting.name, &key.replace('_', "-"));
            let distance =
                distance.min(strsim::damerau_levenshtein(setting.flag, &key.replace('_', "-")));
            (distance, setting.name)
        })
        .min();
    match near {
        Some((distance, name)) if distance <= 1 + name.len() / 3 => {
            format!("there is no setting {key:?}; did you mean {name:?}?")
        }
        _ => format!("there is no setting {key:?}; docs/settings.md lists all"),
    }
}

fn parse(kind: Kind, texts: &[OsString]) -> Result<Value, String> {
    let last = texts.last().map_or(OsStr::new(""), OsString::as_os_str);
    if kind == Kind::Path {
        return if last.is_empty() {
            Err("the path is empty".into())
        } else {
            Ok(Value::Path(last.into()))
        };
    }
    let texts: Vec<&str> = texts
        .iter()
        .map(|text| text.to_str().ok_or("it is not UTF-8"))
        .collect::<Result<_, _>>()?;
    let last = texts.last().copied().unwrap_or_default();
    Ok(match kind {
        Kind::Count(least) => {
            let count = last.trim().parse().map_err(|_| format!("{last:?} is not a number"))?;
            Value::Count(at_least(count, least)?)
        }
        Kind::Duration => Value::Duration(values::duration(last)?),
        Kind::Bytes => Value::Bytes(values::bytes(last)?),
        Kind::Text if last.trim().is_empty() => return Err("the value is empty".into()),
        Kind::Choice(words) if !words.contains(&last) => {
            return Err(format!("it is one of {}", words.join(", ")));
        }
        Kind::Path | Kind::Text | Kind::Choice(_) => Value::Text(last.into()),
        Kind::Flag => Value::Flag(match last.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => true,
            "0" | "false" | "no" | "off" => false,
            _ => return Err(format!("{last:?} is neither true nor false")),
        }),
        Kind::List => {
            let parts = texts.iter().flat_map(|text| text.split(','));
            Value::Texts(parts.map(|part| part.trim().to_owned()).collect())
        }
        Kind::Texts => Value::Texts(texts.iter().map(|text| (*text).to_owned()).collect()),
        Kind::Pairs => {
            let pairs = texts.iter().map(|text| values::pair(text)).collect::<Result<_, _>>()?;
            Value::Pairs(values::unique(pairs))
        }
    })
}

fn at_least(count: u64, least: u64) -> Result<u64, String> {
    if count < least { Err(format!("it must be at least {least}")) } else { Ok(count) }
}

/// A value of the file; paths in it are relative to it.
fn convert(kind: Kind, value: &toml::Value, file: &Path) -> Result<Value, String> {
    let expected = |what: &str| Err(format!("expected {what}"));
    Ok(match (kind, value) {
        (Kind::Path, toml::Value::String(text)) if !text.is_empty() => {
            Value::Path(file.parent().unwrap_or(Path::new("")).join(text))
        }
        (Kind::Path, _) => return expected("a path in quotation marks"),
        (Kind::Flag, toml::Value::Boolean(on)) => Value::Flag(*on),
        (Kind::Flag, _) => return expected("true or false"),
        (Kind::Count(least), toml::Value::Integer(count)) => {
            let count = u64::try_from(*count).map_err(|_| "it is negative")?;
            Value::Count(at_least(count, least)?)
        }
        (Kind::Count(_), _) => return expected("a number"),
        (Kind::Duration | Kind::Bytes, toml::Value::Integer(number)) => {
            parse(kind, &[number.to_string().into()])?
        }
        (Kind::Duration, toml::Value::Float(number)) => parse(kind, &[number.to_string().into()])?,
        (Kind::List | Kind::Texts, toml::Value::Array(items)) => {
            let texts = items.iter().map(|item| item.as_str().map(OsString::from));
            match texts.collect::<Option<Vec<OsString>>>() {
                Some(texts) => parse(kind, &texts)?,
                None => return expected("a list of texts in quotation marks"),
            }
        }
        (Kind::Pairs, toml::Value::Table(table)) => {
            let pairs = table.iter().map(|(name, value)| match value {
                toml::Value::String(text) => Some((name.clone(), text.clone())),
                toml::Value::Integer(number) => Some((name.clone(), number.to_string())),
                _ => None,
            });
            match pairs.collect::<Option<Vec<_>>>() {
                Some(pairs) => Value::Pairs(pairs),
                None => return expected("texts in quotation marks as values"),
            }
        }
        (Kind::Pairs, _) => return expected("a table, as in [env]"),
        (_, toml::Value::String(text)) => parse(kind, &[text.into()])?,
        _ => return expected("a text in quotation marks"),
    })
}

/// The page `docs/settings.md`.
pub(crate) fn page() -> String {
    let mut page = String::from(
        "# Settings of `deuteron run` and `deuteron bench`\n\n\
         Printed by `deuteron settings`, from the registry in `crates/cli/src/settings.rs`; a test keeps it so.\n\n\
         A flag wins over an environment variable, a variable over the file of `--config`, the file over the default. An empty\n\
         variable counts as unset. Where a value is wrong, the error says where it came from. `deuteron run --verbose` says where\n\
         each came from.\n\n\
         | kind | how it is written |\n|---|---|\n\
         | number | `4` |\n\
         | time | `90` or `90s`, `1.5m`, `2h`, `250ms` |\n\
         | size | bytes, or `80GB` (10⁹), `16GiB` (2³⁰) |\n\
         | switch | the flag alone; `--no-timestamps`, `DEUTERON_TIMESTAMPS=0` and `timestamps = false` turn it off |\n\
         | list | `a:2,b:2`; in the file also `[\"a:2\", \"b:2\"]` |\n\
         | word | one of those that the text names |\n\
         | path | relative to the current folder; in the file, relative to the file |\n\n\
         ```toml\n\
         # train.toml, for `deuteron run --config train.toml -- python train.py`\n\
         hosts = [\"node1:4\", \"node2:4\"]\n\
         accelerator = \"/gpu/h200\"\n\
         restarts = 3\n\
         start-timeout = \"2m\"\n\n\
         [env]\n\
         NCCL_DEBUG = \"WARN\"\n\
         ```\n",
    );
    let mut group = "";
    for setting in SETTINGS {
        if setting.group != group {
            group = setting.group;
            let _ = write!(
                page,
                "\n## {group}\n\n| flag | environment | file | kind | default | Horovod's name | |\n|---|---|---|---|---|---|---|\n"
            );
        }
        let _ = writeln!(page, "{}", row(setting));
    }
    page.push_str(
        "\n## Flags of `horovodrun` without a counterpart\n\n| flags | why |\n|---|---|\n",
    );
    for (flags, why) in LEFT_OUT {
        let flags: Vec<String> = flags.iter().map(|flag| format!("`{flag}`")).collect();
        let _ = writeln!(page, "| {} | {why} |", flags.join(", "));
    }
    page
}

fn row(setting: &Setting) -> String {
    let code = |text: &str| format!("`{text}`");
    let flag = match (setting.short, setting.takes_value()) {
        (Some(short), true) => format!("`-{short}`, `--{} {}`", setting.flag, setting.value),
        (Some(short), false) => format!("`-{short}`, `--{}`", setting.flag),
        (None, true) => format!("`--{} {}`", setting.flag, setting.value),
        (None, false) => format!("`--{}`", setting.flag),
    };
    let kind = match setting.kind {
        Kind::Count(_) => "number",
        Kind::Duration => "time",
        Kind::Bytes => "size",
        Kind::Path => "path",
        Kind::Text => "text",
        Kind::Choice(_) => "word",
        Kind::Flag => "switch",
        Kind::List => "list",
        Kind::Texts => "texts",
        Kind::Pairs => "texts by name",
    };
    let horovod: Vec<String> = setting
        .horovod_flags
        .iter()
        .copied()
        .chain(setting.horovod_environment)
        .map(code)
        .collect();
    let default = match setting.kind {
        Kind::Flag => code("false"),
        _ => setting.default.map(code).unwrap_or_default(),
    };
    format!(
        "| {flag} | {} | {} | {kind} | {default} | {} | {} |",
        if setting.environment { code(&setting.variable()) } else { String::new() },
        if setting.file { code(setting.name) } else { String::new() },
        horovod.join(", "),
        setting.help,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(flags: &[&str], environment: &[(&str, &str)]) -> Result<Settings, Error> {
        let flags = from_horovod(flags.iter().map(OsString::from).collect())?;
        let command = clap::Command::new("run").no_binary_name(true).args(arguments());
        let matches =
            command.try_get_matches_from(flags).map_err(|error| Error::Usage(error.to_string()))?;
        Settings::resolve(&matches, |name| {
            environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    fn problem(flags: &[&str], environment: &[(&str, &str)]) -> (u8, String) {
        let error = resolve(flags, environment).unwrap_err();
        (error.exit_code(), error.to_string())
    }

    fn file(text: &str) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_committed_page_is_the_generated_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == page(),
            "docs/settings.md is out of date: cargo run -p deuteron-cli -- settings > docs/settings.md"
        );
    }

    #[test]
    fn names_are_unique_and_defaults_mean_something() {
        clap::Command::new("run").args(arguments()).debug_assert();
        let names: std::collections::BTreeSet<_> =
            SETTINGS.iter().map(|setting| setting.name).collect();
        assert_eq!(names.len(), SETTINGS.len());
        for setting in SETTINGS {
            assert!(setting.help.ends_with('.'), "{}", setting.name);
            assert!(!setting.group.is_empty(), "{}", setting.name);
            if let Some(default) = setting.default {
                parse(setting.kind, &[default.into()]).unwrap();
            }
        }
    }

    #[test]
    fn flag_over_environment_over_file_over_default() {
        let (_folder, path) = file("restarts = 1\ngrace = \"1s\"\nstart-timeout = 1\n");
        let environment = [
            ("DEUTERON_CONFIG", path.as_str()),
            ("DEUTERON_RESTARTS", "2"),
            ("DEUTERON_GRACE", "2s"),
        ];
        let settings = resolve(&["--restarts", "3"], &environment).unwrap();
        assert_eq!(settings.count("restarts"), Some(3));
        assert_eq!(settings.duration("grace"), Duration::from_secs(2));
        assert_eq!(settings.duration("start-timeout"), Duration::from_secs(1));
        assert_eq!(settings.count("accelerators-per-task"), Some(1));
        assert_eq!(
            settings.explained(),
            [
                "restarts = 3 (--restarts)".to_owned(),
                format!("start-timeout = 1s ({path})"),
                "grace = 2s (DEUTERON_GRACE)".to_owned(),
                format!("config = {path} (DEUTERON_CONFIG)"),
            ]
        );
    }

    #[test]
    fn a_switch_can_be_turned_off() {
        let (_folder, path) = file("timestamps = true\n");
        assert!(resolve(&["--config", &path], &[]).unwrap().flag("timestamps"));
        assert!(!resolve(&["--config", &path, "--no-timestamps"], &[]).unwrap().flag("timestamps"));
        assert!(
            resolve(&["--timestamps"], &[("DEUTERON_TIMESTAMPS", "0")]).unwrap().flag("timestamps")
        );
        assert!(!resolve(&[], &[("DEUTERON_TIMESTAMPS", "")]).unwrap().flag("timestamps"));
    }

    #[test]
    fn the_file_sets_everything() {
        let (folder, path) = file(
            "tasks = 4\nhosts = [\"a:2\", \"b:2\"]\naccelerator-memory = \"80GB\"\noutput = \"logs\"\n\
             ssh-option = [\"A=1,2\"]\n[env]\nA = \"1\"\nB = 2\n",
        );
        let settings = resolve(&["--config", &path], &[]).unwrap();
        assert_eq!(settings.count("tasks"), Some(4));
        assert_eq!(settings.texts("hosts").unwrap(), ["a:2", "b:2"]);
        assert_eq!(settings.texts("ssh-option").unwrap(), ["A=1,2"]);
        assert_eq!(settings.count("accelerator-memory"), Some(80_000_000_000));
        assert_eq!(settings.path("output"), Some(folder.path().join("logs").as_path()));
        assert_eq!(settings.pairs("env"), [("A".into(), "1".into()), ("B".into(), "2".into())]);
    }

    #[test]
    fn errors_say_where_the_value_came_from() {
        let (_folder, path) = file("restarts = \"many\"\n");
        for (flags, environment, code, text) in [
            (vec!["-n", "0"], vec![], 64, "--tasks 0: it must be at least 1".to_owned()),
            (vec!["-n", "x"], vec![], 64, "--tasks x: \"x\" is not a number".to_owned()),
            (
                vec![],
                vec![("DEUTERON_RESTARTS", "-1")],
                78,
                "DEUTERON_RESTARTS=-1: \"-1\" is not a number".to_owned(),
            ),
            (
                vec![],
                vec![("HOROVOD_START_TIMEOUT", "soon")],
                78,
                "HOROVOD_START_TIMEOUT=soon: \"soon\" is not a duration".to_owned(),
            ),
            (
                vec!["--config", &path],
                vec![],
                78,
                format!("in {path}: restarts = \"many\": expected a number"),
            ),
            (vec!["--config", "/nowhere.toml"], vec![], 78, "cannot read /nowhere.toml".to_owned()),
            (vec!["--config", "a.yaml"], vec![], 78, "in a.yaml: this is a YAML file".to_owned()),
            (
                vec!["--tuning", "fast"],
                vec![],
                64,
                "--tuning fast: it is one of auto, off, measure".to_owned(),
            ),
            (vec!["--env", "A"], vec![], 64, "--env A: \"A\" is not NAME=VALUE".to_owned()),
            (
                vec!["--hosts", "a", "--hostfile", "f"],
                vec![],
                64,
                "--hosts a: it contradicts hostfile".to_owned(),
            ),
        ] {
            let (found, problem) = problem(&flags, &environment);
            assert_eq!(found, code, "{problem}");
            assert!(problem.starts_with(&text), "{problem}");
        }
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_name() {
        for (key, near) in [
            ("start_timeout", "did you mean \"start-timeout\"?"),
            ("restart", "did you mean \"restarts\"?"),
            ("per-task", "did you mean \"accelerators-per-task\"?"),
            ("zzz", "docs/settings.md lists all"),
            ("config", "there is no setting \"config\""),
        ] {
            let (_folder, path) = file(&format!("{key} = 1\n"));
            let (code, problem) = problem(&["--config", &path], &[]);
            assert_eq!(code, 78);
            assert!(problem.contains(near), "{problem}");
        }
        let (_folder, path) = file("tasks = \n");
        assert!(problem(&["--config", &path], &[]).1.contains("line 1"));
    }

    #[test]
    fn the_stronger_of_two_ways_to_say_hosts_wins() {
        let settings = resolve(&["--hosts", "a:1"], &[("DEUTERON_HOSTFILE", "f")]).unwrap();
        assert_eq!(settings.path("hostfile"), None);
        assert!(settings.texts("hosts").is_some());
    }

    #[test]
    fn horovod_flags() {
        let settings = resolve(
            &[
                "-np",
                "4",
                "-H",
                "a:2,b:2",
                "-p",
                "2222",
                "-i",
                "key",
                "--output-filename",
                "logs",
                "-prefix-timestamp",
                "--network-interface",
                "eth0",
                "--start-timeout",
                "30",
            ],
            &[],
        )
        .unwrap();
        assert_eq!(settings.count("tasks"), Some(4));
        assert_eq!(settings.count("ssh-port"), Some(2222));
        assert_eq!(settings.path("output"), Some(Path::new("logs")));
        assert_eq!(settings.text("interface"), Some("eth0"));
        assert!(settings.flag("timestamps"));
        assert_eq!(settings.duration("start-timeout"), Duration::from_secs(30));
        assert_eq!(resolve(&["--num-proc=3"], &[]).unwrap().count("tasks"), Some(3));
        assert_eq!(resolve(&["-np=3"], &[]).unwrap().count("tasks"), Some(3));
        let (code, text) = problem(&["-np", "2", "--gloo"], &[]);
        assert_eq!(
            (code, text.as_str()),
            (64, "--gloo of horovodrun has no counterpart, leave it out: there is one controller")
        );
    }

    #[test]
    fn the_command_of_the_tasks_is_left_alone() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (given, expected) in [
            ("-np 2 mpirun -np 4 --gloo", "--tasks 2 mpirun -np 4 --gloo"),
            ("-n 2 -- -np", "-n 2 -- -np"),
            ("--timestamps train -np", "--timestamps train -np"),
            ("-e -np", "-e --tasks"),
        ] {
            assert_eq!(from_horovod(words(given)).unwrap(), words(expected));
        }
    }
}
