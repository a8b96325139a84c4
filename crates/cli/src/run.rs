//! `deuteron run`: from settings to a job, from its events to the terminal, from its outcome to an exit code.

use crate::{
    error::Error,
    output::{Closed, Descriptor, Files, Look, Printer, Verbosity},
    settings::Settings,
    signals,
    status::{Interruption, Status, exit},
    terminal,
    values::{self, counted},
};
use clap::ArgMatches;
use deuteron_gang::{
    Event, Host, Job, Request, Ssh,
    discovery::Source,
    policy::Restarts,
    supervisor::{self, Control},
};
use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, IsTerminal as _},
    os::{fd::AsFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// How often the progress line is drawn again.
const TICK: Duration = Duration::from_millis(250);

/// What a job takes from this machine when its settings do not say.
pub(crate) struct Here {
    pub cores: usize,
    /// Program and arguments that start this program again.
    pub program: Vec<OsString>,
    pub path: OsString,
    /// Whether the user has said how Python is to buffer.
    pub unbuffered: bool,
}

/// Runs the job that the arguments describe.
pub(crate) fn run(matches: &ArgMatches, here: &Here) -> u8 {
    let variable = |name: &str| env::var_os(name);
    let settings = match Settings::resolve(matches, variable) {
        Ok(settings) => settings,
        Err(error) => {
            return refuse(&error, variable("DEUTERON_STATUS_FILE").map(PathBuf::from).as_deref());
        }
    };
    let status_file = settings.path("status-file");
    let command: Vec<OsString> =
        matches.get_many("command").into_iter().flatten().cloned().collect();
    let prepared = job(&settings, command, here).and_then(|job| {
        let files = settings.path("output").map(|folder| Files::create(folder.into(), job.tasks));
        let files =
            files.transpose().map_err(|error| settings.refuse("output", &error.to_string()))?;
        Ok((job, files))
    });
    let (job, files) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return refuse(&error, status_file),
    };
    match supervise(job, files, &settings, |_, _| None) {
        Ok(finished) => {
            conclude(&finished.status, &finished.printer, status_file);
            finished.status.exit_code
        }
        Err(error) => no_terminal(&error),
    }
}

/// Says why nothing can be said.
pub(crate) fn no_terminal(error: &io::Error) -> u8 {
    terminal::complain(&format!(
        "standard output, standard error or signals cannot be used: {error}"
    ));
    exit::SYSTEM
}

/// Says why nothing was started, on the terminal and in the status file.
pub(crate) fn refuse(error: &Error, status_file: Option<&Path>) -> u8 {
    terminal::complain(&error.to_string());
    if let Some(path) = status_file
        && let Err(error) = Status::invalid(error).write(path)
    {
        terminal::complain(&format!("cannot write {}: {error}", path.display()));
    }
    error.exit_code()
}

type Shared<T> = Arc<Mutex<T>>;

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job that has ended.
pub(crate) struct Finished {
    status: Status,
    printer: Shared<Printer>,
    results: Vec<Option<Vec<u8>>>,
}

impl Finished {
    /// Says how it ended, prints what `text` makes of the tasks' results if it ended well, and returns the exit code.
    pub(crate) fn conclude(
        mut self,
        status_file: Option<&Path>,
        text: impl FnOnce(&[Option<Vec<u8>>]) -> serde_json::Result<String>,
    ) -> u8 {
        if self.status.outcome != "succeeded" {
            conclude(&self.status, &self.printer, status_file);
            return self.status.exit_code;
        }
        let code = match text(&self.results) {
            Ok(text) => {
                lock(&self.printer).clear();
                crate::print(text.as_bytes())
            }
            Err(error) => {
                self.status.outcome = "failed";
                self.status.reason = format!("rank 0 returned something unreadable: {error}");
                exit::SOFTWARE
            }
        };
        self.status.exit_code = code;
        conclude(&self.status, &self.printer, status_file);
        code
    }
}

/// Runs the job while signals and events are looked after. `take` may show an event in its own way.
pub(crate) fn supervise(
    job: Job,
    files: Option<Files>,
    settings: &Settings,
    take: impl Fn(&mut Printer, &Event) -> Option<Result<(), Closed>> + Send + 'static,
) -> io::Result<Finished> {
    let printer = Printer::new(
        look(settings),
        Box::new(Descriptor::of(io::stdout().as_fd())?),
        Box::new(Descriptor::of(io::stderr().as_fd())?),
        files,
    );
    let printer = Arc::new(Mutex::new(printer));
    if settings.flag("verbose") {
        for line in settings.explained() {
            lock(&printer).note(&line);
        }
    }
    let (control, interruption) = (Control::default(), Arc::new(Mutex::new(None)));
    let (heard, ender, shown) = (Arc::clone(&interruption), control.clone(), Arc::clone(&printer));
    signals::watch(control.clone(), move |signal| {
        lock(&heard).get_or_insert(Interruption::Signal(signal));
        ender.end(signals::name(signal));
        // A terminal that is paused holds the printer; the job ends all the same.
        if let Ok(mut printer) = shown.try_lock() {
            let name = signals::name(signal);
            printer.note(&format!(
                "{name}: ending the tasks; once more ends this command without waiting for them"
            ));
        }
    })?;
    let stop_ticking = tick(Arc::clone(&printer))?;
    let (tasks, hosts, start) = (job.tasks, job.hosts.len(), Instant::now());
    let (ender, closed, shown) = (control.clone(), Arc::clone(&interruption), Arc::clone(&printer));
    let result = supervisor::run(job, &control, move |event| {
        let mut printer = lock(&shown);
        let taken = take(&mut printer, &event);
        let shown =
            taken.unwrap_or_else(|| printer.event(event, Instant::now(), SystemTime::now()));
        drop(printer);
        if let Err(how) = shown {
            lock(&closed).get_or_insert(match how {
                Closed::ByReader => Interruption::OutputClosed,
                Closed::ByError => Interruption::OutputFailed,
            });
            ender.end("the end of its output");
        }
    });
    drop(stop_ticking);
    let mut status = Status::of(&result, *lock(&interruption), tasks, hosts);
    let shown = lock(&printer);
    status.generation = status.generation.or(shown.generation);
    status.hosts = shown.hosts.unwrap_or(hosts);
    if result.is_err() {
        status.ran_for = start.elapsed();
    }
    drop(shown);
    let results = result.map_or_else(|_| Vec::new(), |outcome| outcome.results);
    Ok(Finished { status, printer, results })
}

/// Lets the printer know that time passes, until what it returns is dropped.
fn tick(printer: Shared<Printer>) -> io::Result<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    thread::Builder::new().name("deuteron-progress".into()).spawn(move || {
        while stopped.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
            if let Ok(mut printer) = printer.try_lock() {
                printer.tick(Instant::now());
            }
        }
    })?;
    Ok(stop)
}

pub(crate) fn verbosity(settings: &Settings) -> Verbosity {
    match (settings.flag("quiet"), settings.flag("verbose")) {
        (true, _) => Verbosity::Quiet,
        (false, false) => Verbosity::Normal,
        (false, true) => Verbosity::Verbose,
    }
}

fn look(settings: &Settings) -> Look {
    let stderr = io::stderr();
    let size = rustix::termios::tcgetwinsize(&stderr).ok().filter(|_| stderr.is_terminal());
    // Some terminals do not know how wide they are, and say 0.
    let width = size.map(|size| if size.ws_col == 0 { 80 } else { size.ws_col.into() });
    Look {
        stdout_colour: terminal::has_colour(&io::stdout()),
        stderr_colour: terminal::has_colour(&stderr),
        width,
        timestamps: settings.flag("timestamps"),
        verbosity: verbosity(settings),
        starter: None,
    }
}

fn conclude(status: &Status, printer: &Mutex<Printer>, status_file: Option<&Path>) {
    let mut printer = lock(printer);
    match summary(status) {
        Ok(text) => printer.note(&text),
        Err(text) if text.is_empty() => {}
        Err(text) => printer.error(&text),
    }
    if let Some(path) = status_file
        && let Err(error) = status.write(path)
    {
        printer.error(&format!("cannot write {}: {error}", path.display()));
    }
}

/// The last line: a note, or what went wrong. Nothing when the reader of the output has left.
fn summary(status: &Status) -> Result<String, String> {
    if status.outcome != "succeeded" {
        let closed = status.signal == Some(signal_hook::consts::SIGPIPE);
        return Err(match status.outcome == "interrupted" && closed {
            true => String::new(),
            false => status.reason.clone(),
        });
    }
    let restarts = match status.generation {
        None | Some(0) => String::new(),
        Some(generation) => format!(", after {}", counted(generation as usize, "restart")),
    };
    Ok(format!(
        "{} on {} succeeded in {:.1} s{restarts}",
        counted(status.tasks, "task"),
        counted(status.hosts, "host"),
        status.ran_for.as_secs_f64(),
    ))
}

/// What groups and engines of the tasks have to know. All tasks are told the same: ranks that tune or fuse differently
/// cannot work together.
fn for_tasks(settings: &Settings) -> impl Iterator<Item = (&'static str, String)> {
    let stall = settings.duration("stall-report").as_secs_f64();
    let deterministic = u8::from(settings.flag("deterministic"));
    [
        ("DEUTERON_TUNING", settings.text("tuning").map(str::to_owned)),
        ("DEUTERON_BUCKET_SIZE", settings.count("bucket-size").map(|bytes| bytes.to_string())),
        ("DEUTERON_DETERMINISTIC", Some(deterministic.to_string())),
        ("DEUTERON_STALL_REPORT", Some(stall.to_string())),
        ("DEUTERON_TIMELINE", settings.path("timeline").map(|path| path.display().to_string())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
}

/// The job that the settings describe, if it makes sense.
pub(crate) fn job(settings: &Settings, command: Vec<OsString>, here: &Here) -> Result<Job, Error> {
    let (tasks, hosts) = places(settings, here)?;
    let mut environment = settings.pairs("env");
    // Into a pipe Python prints by the block, and a line would appear long after it was printed.
    if !here.unbuffered && !environment.iter().any(|(name, _)| name == "PYTHONUNBUFFERED") {
        environment.push(("PYTHONUNBUFFERED".into(), "1".into()));
    }
    for (name, value) in for_tasks(settings) {
        if !environment.iter().any(|(known, _)| known == name) {
            environment.push((name.into(), value));
        }
    }
    if hosts.iter().all(Host::is_here) {
        let path = environment.iter().find(|(name, _)| name == "PATH");
        find(&command, path.map_or(here.path.as_os_str(), |(_, path)| OsStr::new(path)))?;
    }
    let port = settings.count("ssh-port").map(u16::try_from).transpose();
    let ssh = Ssh {
        port: port.map_err(|_| settings.refuse("ssh-port", "a port is at most 65535"))?,
        identity: settings.path("ssh-identity-file").map(Path::to_owned),
        options: settings
            .texts("ssh-option")
            .into_iter()
            .flatten()
            .flat_map(|option| [OsString::from("-o"), option.into()])
            .collect(),
        ..Ssh::default()
    };
    if settings.text("interface").is_some_and(|interface| interface.contains(',')) {
        return Err(
            settings.refuse("interface", "name one interface, or none: the route is found without")
        );
    }
    let agent = match settings.text("agent") {
        Some(words) => words.split_whitespace().map(OsString::from).collect(),
        None => here.program.iter().cloned().chain(["agent".into()]).collect(),
    };
    let (request, discovery) = accelerators(settings)?;
    Ok(Job {
        tasks,
        command,
        environment,
        payload: Arc::default(),
        hosts,
        request,
        discovery,
        first_generation: 0,
        restarts: Restarts { most: narrow(settings, "restarts")?, ..Restarts::default() },
        start_limit: settings.duration("start-timeout"),
        grace: settings.duration("grace"),
        interface: settings.text("interface").map(str::to_owned),
        ssh,
        agent,
    })
}

/// How many tasks, and where.
fn places(settings: &Settings, here: &Here) -> Result<(usize, Vec<Host>), Error> {
    let wanted = settings.count("tasks").map(|_| narrow(settings, "tasks")).transpose()?;
    let hosts = match (settings.texts("hosts"), settings.path("hostfile")) {
        (Some(texts), _) => values::hosts(texts.iter().map(String::as_str))
            .map_err(|problem| settings.refuse("hosts", &problem))?,
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(|error| {
                settings.refuse("hostfile", &format!("cannot read it: {error}"))
            })?;
            values::hostfile(&text).map_err(|problem| {
                Error::Configuration(format!("in {}: {problem}", path.display()))
            })?
        }
        (None, None) => vec![Host::here(wanted.unwrap_or(here.cores as u32))],
    };
    let slots: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
    match wanted {
        Some(tasks) if u64::from(tasks) > slots => {
            let problem = format!(
                "the {} have {}; name more hosts or slots, or start fewer tasks",
                counted(hosts.len(), "host"),
                counted(slots as usize, "slot")
            );
            Err(settings.refuse("tasks", &problem.replace("the 1 host have", "the 1 host has")))
        }
        Some(tasks) => Ok((tasks as usize, hosts)),
        None => Ok((slots as usize, hosts)),
    }
}

fn narrow(settings: &Settings, name: &str) -> Result<u32, Error> {
    u32::try_from(settings.count(name).unwrap_or_default())
        .map_err(|_| settings.refuse(name, "this is too much"))
}

/// What each task asks for, and how hosts find out what they have. Without a request nobody looks.
pub(crate) fn accelerators(settings: &Settings) -> Result<(Option<Request>, Vec<Source>), Error> {
    let Some(path) = settings.text("accelerator") else {
        let idle = [
            "accelerators-per-task",
            "accelerator-memory",
            "accelerator-optional",
            "discovery-script",
        ];
        return match idle.iter().find(|name| settings.is_typed(name)) {
            Some(name) => Err(settings
                .refuse(name, "this says nothing without --accelerator, as in --accelerator /gpu")),
            None => Ok((None, Vec::new())),
        };
    };
    let path: deuteron_gang::AcceleratorPath =
        path.parse().map_err(|error: deuteron_gang::Error| {
            settings.refuse("accelerator", &error.to_string())
        })?;
    let source = match settings.path("discovery-script") {
        Some(script) => {
            let absolute = std::path::absolute(script)
                .map_err(|error| settings.refuse("discovery-script", &error.to_string()))?;
            Source::Script { path: absolute, kind: path.kind().to_owned() }
        }
        None => Source::Nvml,
    };
    let request = Request {
        path,
        per_task: narrow(settings, "accelerators-per-task")?,
        memory: settings.count("accelerator-memory").unwrap_or_default(),
        required: !settings.flag("accelerator-optional"),
    };
    Ok((Some(request), vec![source]))
}

/// Whether the tasks' program is on this machine.
fn find(command: &[OsString], path: &OsStr) -> Result<(), Error> {
    let Some(program) = command.first() else {
        return Err(Error::Usage("no command is named; write it after --".into()));
    };
    let shown = program.to_string_lossy();
    let is_program = |file: &Path| {
        file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    if program.as_encoded_bytes().contains(&b'/') {
        return match Path::new(program) {
            file if is_program(file) => Ok(()),
            file if file.is_dir() => {
                Err(Error::Usage(format!("{shown} is a folder, not a program")))
            }
            file if file.exists() => Err(Error::Usage(format!(
                "{shown} is not executable; chmod +x {shown}, or name its interpreter first"
            ))),
            _ => Err(Error::Usage(format!("{shown} does not exist"))),
        };
    }
    if env::split_paths(path).any(|folder| is_program(&folder.join(program))) {
        return Ok(());
    }
    let hint = if Path::new(program).exists() {
        format!("; did you mean ./{shown}?")
    } else {
        String::new()
    };
    Err(Error::Usage(format!("{shown} is not found in PATH{hint}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_of(words: &[&str]) -> Result<Job, Error> {
        let matches = crate::command()
            .try_get_matches_from(["deuteron", "run"].iter().chain(words))
            .map_err(|error| Error::Usage(error.to_string()))?;
        let (_, matches) = matches.subcommand().unwrap();
        let settings = Settings::resolve(matches, |_| None)?;
        let command = matches.get_many("command").into_iter().flatten().cloned().collect();
        let here = Here {
            cores: 3,
            program: vec!["/bin/deuteron".into()],
            path: "/usr/bin:/bin".into(),
            unbuffered: false,
        };
        job(&settings, command, &here)
    }

    fn places_of(words: &[&str]) -> (usize, Vec<(String, u32)>) {
        let job = job_of(words).unwrap();
        (job.tasks, job.hosts.into_iter().map(|host| (host.name, host.slots)).collect())
    }

    #[test]
    fn tasks_and_hosts_complete_each_other() {
        let here = |slots| vec![("localhost".to_owned(), slots)];
        assert_eq!(places_of(&["true"]), (3, here(3)));
        assert_eq!(places_of(&["-n", "7", "true"]), (7, here(7)));
        assert_eq!(places_of(&["--hosts", "localhost:2", "true"]), (2, here(2)));
        let (tasks, hosts) = places_of(&["-n", "3", "-H", "a:2,b:2", "train.py"]);
        assert_eq!((tasks, hosts.len()), (3, 2));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, "a slots=2\nb:3\n").unwrap();
        assert_eq!(places_of(&["--hostfile", path.to_str().unwrap(), "train.py"]).0, 5);
    }

    #[test]
    fn the_command_needs_no_dashes_and_keeps_its_own() {
        let words = |words: &[&str]| job_of(words).unwrap().command;
        assert_eq!(
            words(&["-n", "2", "echo", "-n", "x", "--", "y"]),
            ["echo", "-n", "x", "--", "y"]
        );
        assert_eq!(words(&["-n", "2", "--", "echo", "--help"]), ["echo", "--help"]);
        assert_eq!(words(&["--timestamps", "echo", "--version"]), ["echo", "--version"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_before_anything_starts() {
        for (words, problem) in [
            (
                vec!["-n", "5", "-H", "a:2,b:2", "x"],
                "--tasks 5: the 2 hosts have 4 slots; name more",
            ),
            (vec!["-n", "5", "-H", "a:2", "x"], "--tasks 5: the 1 host has 2 slots"),
            (vec!["-n", "5000000000", "true"], "--tasks 5000000000: this is too much"),
            (vec!["-H", "a:2,a:1", "x"], "--hosts a:2,a:1: a is named twice"),
            (vec!["--hostfile", "/nowhere", "x"], "--hostfile /nowhere: cannot read it"),
            (vec!["no-such-program"], "no-such-program is not found in PATH"),
            (vec!["/no/such/program"], "/no/such/program does not exist"),
            (vec!["/etc/passwd"], "/etc/passwd is not executable; chmod"),
            (vec!["/etc"], "/etc is a folder"),
            (vec!["src"], "src is not found in PATH; did you mean ./src?"),
            (vec!["-p", "70000", "true"], "--ssh-port 70000: a port is at most 65535"),
            (
                vec!["--per-task", "2", "true"],
                "--per-task 2: this says nothing without --accelerator",
            ),
            (vec!["--optional", "true"], "--optional: this says nothing without"),
            (vec!["--interface", "a,b", "true"], "--interface a,b: name one interface"),
        ] {
            let error = job_of(&words).unwrap_err();
            assert_eq!(error.exit_code(), 64);
            assert!(error.to_string().starts_with(problem), "{error}");
        }
        assert!(job_of(&["--accelerator", "gpu", "true"]).is_err());
        assert!(job_of(&["--unknown", "true"]).is_err());
        assert!(job_of(&[]).is_err());
    }

    #[test]
    fn a_remote_program_is_not_looked_for_here() {
        assert!(job_of(&["-H", "far:1", "no-such-program"]).is_ok());
        assert!(job_of(&["--env", "PATH=/nowhere", "true"]).is_err());
    }

    #[test]
    fn everything_reaches_the_job() {
        let job = job_of(&[
            "--accelerator",
            "/gpu/h200",
            "--per-task",
            "2",
            "--memory",
            "80GB",
            "--optional",
            "--restarts",
            "3",
            "--start-timeout",
            "2m",
            "--grace",
            "1",
            "--env",
            "A=1",
            "--env",
            "B=x,y",
            "--interface",
            "eth0",
            "-p",
            "22",
            "-i",
            "key",
            "--ssh-option",
            "ProxyJump=a,b",
            "--tuning",
            "off",
            "true",
        ])
        .unwrap();
        let request = job.request.unwrap();
        assert_eq!((request.path.to_string().as_str(), request.per_task), ("/gpu/h200", 2));
        assert_eq!(request.memory, 80_000_000_000);
        assert!(!request.required);
        assert_eq!(job.discovery, [Source::Nvml]);
        assert_eq!(job.restarts.most, 3);
        assert_eq!((job.start_limit.as_secs(), job.grace.as_secs()), (120, 1));
        let environment: Vec<String> =
            job.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let expected = [
            "A=1",
            "B=x,y",
            "PYTHONUNBUFFERED=1",
            "DEUTERON_TUNING=off",
            "DEUTERON_BUCKET_SIZE=8388608",
            "DEUTERON_DETERMINISTIC=0",
            "DEUTERON_STALL_REPORT=60",
        ];
        assert_eq!(environment, expected);
        assert_eq!(job.interface.as_deref(), Some("eth0"));
        assert_eq!(job.ssh.options, ["-o", "ProxyJump=a,b"]);
        assert_eq!(job.agent, ["/bin/deuteron", "agent"]);
        let other = job_of(&["--agent", "python -m deuteron agent", "true"]).unwrap();
        assert_eq!(other.agent, ["python", "-m", "deuteron", "agent"]);
        assert!(other.request.is_none() && other.discovery.is_empty());
    }

    #[test]
    fn summaries() {
        let good = Status {
            outcome: "succeeded",
            tasks: 4,
            hosts: 1,
            generation: Some(0),
            ..Status::default()
        };
        assert_eq!(summary(&good), Ok("4 tasks on 1 host succeeded in 0.0 s".into()));
        let again = Status { generation: Some(2), ..good };
        assert_eq!(
            summary(&again),
            Ok("4 tasks on 1 host succeeded in 0.0 s, after 2 restarts".into())
        );
        let bad = Status { outcome: "task-failed", reason: "why".into(), ..Status::default() };
        assert_eq!(summary(&bad), Err("why".into()));
        let closed = Status { outcome: "interrupted", signal: Some(13), ..bad };
        assert_eq!(summary(&closed), Err(String::new()));
    }
}
