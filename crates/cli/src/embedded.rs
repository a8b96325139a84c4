//! The same job and the same look for a program that is not the command: the Python package.

use crate::{
    error::Error,
    output::{Files, Look, Printer},
    run,
    settings::Settings,
    terminal,
};
use clap::ArgMatches;
use deuteron_gang::{Event, Job, discovery::discover};
use std::{
    env,
    ffi::OsString,
    io::Write,
    time::{Instant, SystemTime},
};

/// Where the look of a job goes.
pub struct Screen {
    /// Takes what goes to standard output.
    pub stdout: Box<dyn Write + Send>,
    /// Takes what goes to standard error.
    pub stderr: Box<dyn Write + Send>,
    /// Whether the first is a terminal.
    pub stdout_is_terminal: bool,
    /// How many columns the second has, if it is a terminal.
    pub stderr_width: Option<usize>,
    /// Who starts the agents, one for each task, if the job does not.
    pub starter: Option<&'static str>,
}

/// Shows what happens to a job.
pub struct Show(Printer);

impl Show {
    /// Shows what has happened.
    pub fn event(&mut self, event: Event) {
        // Nothing that is written to here can be closed.
        let _ = self.0.event(event, Instant::now(), SystemTime::now());
    }

    /// Time has passed.
    pub fn tick(&mut self) {
        self.0.tick(Instant::now());
    }

    /// Something that the user should know.
    pub fn note(&mut self, text: &str) {
        self.0.note(text);
    }
}

/// The job on this machine that `words` describe, as after `deuteron run`, and how it is shown. Settings that they do not
/// say come from where the command has them from. Without a number of tasks there is one for each core or, if
/// accelerators are asked for, as many as these are enough for.
pub fn job(
    agent: Vec<OsString>,
    words: &[OsString],
    command: &[OsString],
    screen: Screen,
) -> Result<(Job, Show), String> {
    prepare(agent, words, command, screen).map_err(|error| error.to_string())
}

fn prepare(
    agent: Vec<OsString>,
    words: &[OsString],
    command: &[OsString],
    screen: Screen,
) -> Result<(Job, Show), Error> {
    let settings = Settings::resolve(&parse(words, command)?, variable)?;
    let tasks = match settings.count("tasks") {
        Some(tasks) => tasks,
        None => default_tasks(&settings)?,
    };
    // What is typed wins over a file that names other hosts.
    let mut typed = words.to_vec();
    typed.extend(["--hosts".into(), format!("localhost:{tasks}").into()]);
    if !settings.is_typed("tasks") {
        typed.extend(["--tasks".into(), tasks.to_string().into()]);
    }
    let settings = Settings::resolve(&parse(&typed, command)?, variable)?;
    let mut job = run::job(&settings, command.to_vec(), &crate::here(Vec::new()))?;
    job.agent = agent;
    let files = settings.path("output").map(|folder| Files::create(folder.into(), job.tasks));
    let files = files.transpose().map_err(|error| settings.refuse("output", &error.to_string()))?;
    let look = Look {
        stdout_colour: screen.stdout_is_terminal && terminal::wants_colour(),
        stderr_colour: screen.stderr_width.is_some() && terminal::wants_colour(),
        width: screen.stderr_width,
        timestamps: settings.flag("timestamps"),
        verbosity: run::verbosity(&settings),
        starter: screen.starter,
    };
    Ok((job, Show(Printer::new(look, screen.stdout, screen.stderr, files))))
}

fn parse(words: &[OsString], command: &[OsString]) -> Result<ArgMatches, Error> {
    let start = ["deuteron", "run"].map(OsString::from);
    let all = start.iter().chain(words).cloned().chain(["--".into()]);
    let all = all.chain(command.iter().cloned());
    let matches = crate::command()
        .try_get_matches_from(all)
        .map_err(|error| Error::Usage(error.render().to_string().trim_end().into()))?;
    match matches.subcommand() {
        Some((_, matches)) => Ok(matches.clone()),
        None => Err(Error::Usage("there is nothing to run".into())),
    }
}

/// A setting from the environment; one that names other hosts is for the command.
fn variable(name: &str) -> Option<OsString> {
    let elsewhere = ["DEUTERON_HOSTS", "DEUTERON_HOSTFILE", "DEUTERON_AGENT"];
    env::var_os(name).filter(|_| !elsewhere.contains(&name))
}

fn default_tasks(settings: &Settings) -> Result<u64, Error> {
    let cores = crate::here(Vec::new()).cores as u64;
    let (Some(request), sources) = run::accelerators(settings)? else { return Ok(cores) };
    let found = discover(&sources).accelerators;
    let devices = found.iter().filter(|device| request.matches(device)).count() as u64;
    match devices / u64::from(request.per_task.max(1)) {
        // With none, the placement says what there is instead; without need of them, cores decide.
        0 if request.required => Ok(1),
        0 => Ok(cores),
        tasks => Ok(tasks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    fn job_of(words: &[&str]) -> Result<Job, String> {
        let screen = Screen {
            stdout: Box::new(std::io::sink()),
            stderr: Box::new(std::io::sink()),
            stdout_is_terminal: false,
            stderr_width: None,
            starter: None,
        };
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        job(vec!["agent".into()], &words, &["true".into()], screen).map(|(job, _)| job)
    }

    #[test]
    fn the_job_is_here_and_says_what_is_wrong() {
        let job = job_of(&["--tasks", "3", "--restarts", "2"]).unwrap();
        assert_eq!((job.tasks, job.hosts.len(), job.restarts.most), (3, 1, 2));
        assert!(job.hosts[0].is_here());
        assert_eq!(job.agent, [OsStr::new("agent")]);
        assert!(job_of(&[]).unwrap().tasks >= 1);
        let wrong = job_of(&["--tasks", "2", "--accelerator", "gpu"]).unwrap_err();
        assert!(wrong.contains("does not start with a slash"), "{wrong}");
    }
}
