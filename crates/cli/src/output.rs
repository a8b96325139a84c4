//! What the user sees: the tasks' lines with their ranks, progress, notes, and the files of `--output`.
//!
//! 1. A line is never mixed with another: everything goes through one [`Printer`], and a write ends with a newline.
//! 2. What tasks write to standard output goes there, what they write to standard error goes there too.

use crate::values::counted;
use deuteron_gang::{Event, Stream, TaskInfo};
use std::{
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

/// More files than this are not kept open: with 1,000 tasks they would be more than a process may have.
const OPEN_FILES: usize = 128;
/// A terminal shows who is missing only after this, so that a quick start does not flicker.
const PROGRESS_AFTER: Duration = Duration::from_millis(300);
/// A pipe gets one line about it after this.
const TELL_AFTER: Duration = Duration::from_secs(2);

/// Colours of ranks, as numbers of SGR: the readable ones, on light and on dark.
const COLOURS: [u8; 10] = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94];

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verbosity {
    Quiet,
    Normal,
    Verbose,
}

/// How things are shown.
#[derive(Clone, Debug)]
pub(crate) struct Look {
    pub stdout_colour: bool,
    pub stderr_colour: bool,
    /// The width of the terminal at standard error, if it is one.
    pub width: Option<usize>,
    pub timestamps: bool,
    pub verbosity: Verbosity,
    /// Who starts the agents, one for each task, if not we.
    pub starter: Option<&'static str>,
}

/// Standard output takes nothing any more; what comes after it is dropped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// Its reader has left, as `head` does.
    ByReader,
    /// It cannot be written to; the user has been told.
    ByError,
}

/// Shows events.
pub(crate) struct Printer {
    look: Look,
    stdout: Box<dyn Write + Send>,
    stderr: Box<dyn Write + Send>,
    files: Option<Files>,
    assembly: Option<Assembly>,
    /// A progress line is on the terminal, and must go before anything else is written.
    drawn: bool,
    buffer: Vec<u8>,
    /// The last generation that was started, and on how many hosts.
    pub generation: Option<u64>,
    pub hosts: Option<usize>,
}

struct Assembly {
    since: Instant,
    joined: usize,
    missing: Vec<String>,
    told: bool,
}

impl Printer {
    pub(crate) fn new(
        look: Look,
        stdout: Box<dyn Write + Send>,
        stderr: Box<dyn Write + Send>,
        files: Option<Files>,
    ) -> Self {
        Self {
            look,
            stdout,
            stderr,
            files,
            assembly: None,
            drawn: false,
            buffer: Vec::new(),
            generation: None,
            hosts: None,
        }
    }

    /// Shows what has happened.
    pub(crate) fn event(
        &mut self,
        event: Event,
        now: Instant,
        clock: SystemTime,
    ) -> Result<(), Closed> {
        match event {
            Event::Output { rank, stream, lines } => self.lines(rank, stream, &lines, clock)?,
            Event::Assembling { joined, missing } => {
                let (since, told) =
                    self.assembly.as_ref().map_or((now, false), |old| (old.since, old.told));
                self.assembly = Some(Assembly { since, joined: joined.len(), missing, told });
                self.tick(now);
            }
            Event::Note(note) => self.note(&note),
            Event::Started { generation, tasks } => {
                self.assembly = None;
                self.generation = Some(generation);
                let hosts: BTreeSet<&str> = tasks.iter().map(|task| task.host.as_str()).collect();
                self.hosts = Some(hosts.len());
                self.clear();
                if self.look.verbosity >= Verbosity::Verbose {
                    for task in &tasks {
                        self.note(&described(task));
                    }
                }
                if generation > 0 {
                    self.files_do(|files| files.begin(generation));
                }
            }
            Event::Restarting { reason, .. } => {
                self.assembly = None;
                self.note(&reason);
            }
        }
        Ok(())
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Instant) {
        let Some(assembly) = &mut self.assembly else { return };
        let waited = now.saturating_duration_since(assembly.since);
        if self.look.verbosity == Verbosity::Quiet || assembly.missing.is_empty() {
            return;
        }
        let (joined, all) = (assembly.joined, assembly.joined + assembly.missing.len());
        let seconds = waited.as_secs();
        let text = match self.look.starter {
            Some(starter) => {
                let tasks = counted(all, "task");
                format!("waiting for {starter}: {joined} of {tasks} ready ({seconds} s)")
            }
            None => {
                let (missing, hosts) = (shortened(&assembly.missing), counted(all, "host"));
                format!("waiting for {missing} ({joined} of {hosts} there, {seconds} s)")
            }
        };
        match self.look.width {
            Some(width) if waited >= PROGRESS_AFTER => self.draw(width, &text),
            None if waited >= TELL_AFTER && !assembly.told => {
                assembly.told = true;
                self.note(&text);
            }
            _ => {}
        }
    }

    /// How far something is: one line on a terminal, which the next replaces.
    pub(crate) fn progress(&mut self, text: &str) {
        if self.look.verbosity == Verbosity::Quiet {
            return;
        }
        if let Some(width) = self.look.width {
            self.draw(width, text);
        }
    }

    fn draw(&mut self, width: usize, text: &str) {
        // The last column stays free: a full line would wrap, and could not be replaced.
        let line: String =
            format!("deuteron: {text}").chars().take(width.saturating_sub(1)).collect();
        let _ = self.stderr.write_all(format!("\r\x1b[K{line}").as_bytes());
        self.drawn = true;
    }

    /// Something the user should know, unless they want quiet.
    pub(crate) fn note(&mut self, text: &str) {
        if self.look.verbosity > Verbosity::Quiet {
            self.say("", text);
        }
    }

    /// What went wrong.
    pub(crate) fn error(&mut self, text: &str) {
        self.say("error: ", text);
    }

    fn say(&mut self, label: &str, text: &str) {
        self.clear();
        let line = match (label, self.look.stderr_colour) {
            ("", false) => format!("deuteron: {text}\n"),
            ("", true) => format!("\x1b[1mdeuteron:\x1b[0m {text}\n"),
            (label, false) => format!("deuteron: {label}{text}\n"),
            (label, true) => format!("\x1b[1mdeuteron:\x1b[0m \x1b[1;31m{label}\x1b[0m{text}\n"),
        };
        // There is nobody to tell that standard error is gone.
        let _ = self.stderr.write_all(line.as_bytes());
    }

    /// Takes the progress line away.
    pub(crate) fn clear(&mut self) {
        if self.drawn {
            self.drawn = false;
            let _ = self.stderr.write_all(b"\r\x1b[K");
        }
    }

    fn lines(
        &mut self,
        rank: usize,
        stream: Stream,
        lines: &[u8],
        clock: SystemTime,
    ) -> Result<(), Closed> {
        self.clear();
        let time =
            if self.look.timestamps { format!("{} ", timestamp(clock)) } else { String::new() };
        let colour = match stream {
            Stream::Stdout => self.look.stdout_colour,
            Stream::Stderr => self.look.stderr_colour,
        };
        let prefix = if colour {
            format!("{time}\x1b[{}m[{rank}]\x1b[0m ", COLOURS[rank % COLOURS.len()])
        } else {
            format!("{time}[{rank}] ")
        };
        self.buffer.clear();
        prefixed(&mut self.buffer, prefix.as_bytes(), lines);
        let written = match stream {
            Stream::Stdout => self.stdout.write_all(&self.buffer),
            Stream::Stderr => self.stderr.write_all(&self.buffer),
        };
        if self.files.is_some() {
            self.files_do(|files| files.write(rank, stream, time.as_bytes(), lines));
        }
        match written {
            Err(error) if stream == Stream::Stdout => {
                self.stdout = Box::new(io::sink());
                if error.kind() == io::ErrorKind::BrokenPipe {
                    return Err(Closed::ByReader);
                }
                self.error(&format!("cannot write to standard output: {error}"));
                Err(Closed::ByError)
            }
            _ => Ok(()),
        }
    }

    fn files_do(&mut self, action: impl FnOnce(&mut Files) -> io::Result<()>) {
        let Some(files) = &mut self.files else { return };
        if let Err(error) = action(files) {
            let text = format!(
                "cannot write to {}: {error}; the job goes on without these files",
                files.folder.display()
            );
            self.files = None;
            self.error(&text);
        }
    }
}

/// `lines`, each with `prefix` before it.
fn prefixed(buffer: &mut Vec<u8>, prefix: &[u8], lines: &[u8]) {
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        buffer.extend_from_slice(prefix);
        buffer.extend_from_slice(line);
    }
    if buffer.last().is_some_and(|byte| *byte != b'\n') {
        buffer.push(b'\n');
    }
}

fn described(task: &TaskInfo) -> String {
    let mut text = format!(
        "rank {} is on {} ({}), local rank {} of {}",
        task.rank, task.host, task.address, task.local_rank, task.local_size
    );
    for accelerator in &task.accelerators {
        let _ =
            write!(text, ", {} {} ({})", accelerator.kind, accelerator.index, accelerator.model);
    }
    text
}

fn shortened(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        let _ = write!(text, " and {} more", names.len() - SHOWN);
    }
    text
}

/// The time as ISO 8601 has it, in UTC, to the millisecond.
pub(crate) fn timestamp(clock: SystemTime) -> String {
    let since = clock.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (seconds, milliseconds) = (since.as_secs(), since.subsec_millis());
    let (days, second) = (seconds / 86400, seconds % 86400);
    // Howard Hinnant's days-to-civil: years begin in March, so that the leap day is their last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

/// `FOLDER/rank.N/stdout` and `stderr`, N with as many digits as the last rank has.
pub(crate) struct Files {
    folder: PathBuf,
    digits: usize,
    open: HashMap<(usize, Stream), File>,
    used: BTreeSet<(usize, &'static str)>,
    buffer: Vec<u8>,
}

impl Files {
    /// Makes them empty, so that what cannot be written is known before anything starts.
    pub(crate) fn create(folder: PathBuf, tasks: usize) -> io::Result<Self> {
        let digits = tasks.saturating_sub(1).to_string().len();
        let mut files = Self {
            folder,
            digits,
            open: HashMap::new(),
            used: BTreeSet::new(),
            buffer: Vec::new(),
        };
        for rank in 0..tasks {
            fs::create_dir_all(files.folder_of(rank))?;
            for stream in [Stream::Stdout, Stream::Stderr] {
                File::create(files.folder_of(rank).join(name(stream)))?;
                files.used.insert((rank, name(stream)));
            }
        }
        Ok(files)
    }

    fn folder_of(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("rank.{rank:0digits$}", digits = self.digits))
    }

    fn write(&mut self, rank: usize, stream: Stream, time: &[u8], lines: &[u8]) -> io::Result<()> {
        self.buffer.clear();
        prefixed(&mut self.buffer, time, lines);
        if !self.open.contains_key(&(rank, stream)) {
            if self.open.len() >= OPEN_FILES {
                self.open.clear();
            }
            let path = self.folder_of(rank).join(name(stream));
            let file = OpenOptions::new().append(true).create(true).open(path)?;
            self.open.insert((rank, stream), file);
        }
        match self.open.get_mut(&(rank, stream)) {
            Some(file) => file.write_all(&self.buffer),
            None => Ok(()),
        }
    }

    /// Says in every file that what follows is of another generation.
    fn begin(&mut self, generation: u64) -> io::Result<()> {
        let line = format!("deuteron: generation {generation} starts here\n");
        for (rank, name) in self.used.clone() {
            let stream = if name == "stdout" { Stream::Stdout } else { Stream::Stderr };
            self.write(rank, stream, b"", line.as_bytes())?;
        }
        Ok(())
    }
}

fn name(stream: Stream) -> &'static str {
    match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    }
}

/// A descriptor that is written to without a buffer, also when another process has made it non-blocking.
pub(crate) struct Descriptor(File);

impl Descriptor {
    pub(crate) fn of(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self(descriptor.try_clone_to_owned()?.into()))
    }
}

impl Write for Descriptor {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut wanted = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::OUT)];
                    match poll(&mut wanted, None) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        net::{IpAddr, Ipv4Addr},
        sync::{Arc, Mutex},
    };

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Shared {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const PLAIN: Look = Look {
        stdout_colour: false,
        stderr_colour: false,
        width: None,
        timestamps: false,
        verbosity: Verbosity::Normal,
        starter: None,
    };

    struct Stage {
        printer: Printer,
        stdout: Shared,
        stderr: Shared,
        start: Instant,
    }

    impl Stage {
        fn new(look: Look, files: Option<Files>) -> Self {
            let (stdout, stderr) = (Shared::default(), Shared::default());
            let printer =
                Printer::new(look, Box::new(stdout.clone()), Box::new(stderr.clone()), files);
            Self { printer, stdout, stderr, start: Instant::now() }
        }

        fn show(&mut self, milliseconds: u64, event: Event) {
            let passed = Duration::from_millis(milliseconds);
            let clock = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_000) + passed;
            self.printer.event(event, self.start + passed, clock).unwrap();
        }

        fn tick(&mut self, milliseconds: u64) {
            self.printer.tick(self.start + Duration::from_millis(milliseconds));
        }
    }

    fn output(rank: usize, stream: Stream, lines: &str) -> Event {
        Event::Output { rank, stream, lines: lines.into() }
    }

    fn assembling(joined: &[&str], missing: &[&str]) -> Event {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Event::Assembling { joined: owned(joined), missing: owned(missing) }
    }

    fn started(generation: u64) -> Event {
        let task = TaskInfo {
            rank: 0,
            local_rank: 0,
            local_size: 1,
            cross_rank: 0,
            cross_size: 1,
            host: "a".into(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            accelerators: vec![],
        };
        Event::Started { generation, tasks: vec![task] }
    }

    #[test]
    fn lines_get_their_rank_and_keep_their_stream() {
        let mut stage = Stage::new(PLAIN, None);
        stage.show(0, output(3, Stream::Stdout, "one\n\nthree\n"));
        stage.show(0, output(10, Stream::Stderr, "oh\n"));
        stage.show(0, output(0, Stream::Stdout, "no end"));
        assert_eq!(stage.stdout.text(), "[3] one\n[3] \n[3] three\n[0] no end\n");
        assert_eq!(stage.stderr.text(), "[10] oh\n");
    }

    #[test]
    fn colours_and_times() {
        let look = Look { stdout_colour: true, timestamps: true, ..PLAIN };
        let mut stage = Stage::new(look, None);
        stage.show(7, output(1, Stream::Stdout, "x\n"));
        stage.show(7, output(1, Stream::Stderr, "y\n"));
        assert_eq!(stage.stdout.text(), "2023-11-14T22:13:20.007Z \x1b[33m[1]\x1b[0m x\n");
        assert_eq!(stage.stderr.text(), "2023-11-14T22:13:20.007Z [1] y\n");
    }

    #[test]
    fn times_of_all_kinds_of_days() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (951_868_800, "2000-03-01T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000Z"),
        ] {
            assert_eq!(timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_terminal_sees_who_is_missing_in_one_line() {
        let mut stage = Stage::new(Look { width: Some(60), ..PLAIN }, None);
        stage.show(0, assembling(&["a"], &["b", "c"]));
        stage.tick(299);
        assert_eq!(stage.stderr.text(), "");
        stage.tick(1000);
        stage.show(1500, assembling(&["a", "b"], &["c"]));
        stage.show(1600, started(0));
        assert_eq!(
            stage.stderr.text(),
            "\r\x1b[Kdeuteron: waiting for b, c (1 of 3 hosts there, 1 s)\
             \r\x1b[Kdeuteron: waiting for c (2 of 3 hosts there, 1 s)\r\x1b[K"
        );
    }

    #[test]
    fn progress_is_one_line_on_a_terminal_and_nothing_elsewhere() {
        let mut stage = Stage::new(Look { width: Some(24), ..PLAIN }, None);
        stage.printer.progress("the first of very many");
        stage.printer.progress("the last");
        stage.printer.note("done");
        assert_eq!(
            stage.stderr.text(),
            "\r\x1b[Kdeuteron: the first of \r\x1b[Kdeuteron: the last\r\x1b[Kdeuteron: done\n"
        );
        let mut pipe = Stage::new(PLAIN, None);
        pipe.printer.progress("the first");
        assert_eq!(pipe.stderr.text(), "");
    }

    #[test]
    fn a_pipe_gets_one_line_when_it_takes_long() {
        let mut stage = Stage::new(PLAIN, None);
        stage.show(0, assembling(&[], &["a", "b", "c", "d", "e", "f", "g"]));
        for time in [1000, 2100, 3000] {
            stage.tick(time);
        }
        assert_eq!(
            stage.stderr.text(),
            "deuteron: waiting for a, b, c, d, e and 2 more (0 of 7 hosts there, 2 s)\n"
        );
        let mut invited = Stage::new(Look { starter: Some("Spark"), ..PLAIN }, None);
        invited.show(0, assembling(&["task 1"], &["task 0"]));
        invited.tick(2100);
        let text = "deuteron: waiting for Spark: 1 of 2 tasks ready (2 s)\n";
        assert_eq!(invited.stderr.text(), text);
        let mut quiet = Stage::new(Look { verbosity: Verbosity::Quiet, ..PLAIN }, None);
        quiet.show(0, assembling(&[], &["a"]));
        quiet.tick(3000);
        quiet.show(0, Event::Note("x".into()));
        quiet.printer.error("bad");
        assert_eq!(quiet.stderr.text(), "deuteron: error: bad\n");
    }

    #[test]
    fn restarts_and_places_are_told() {
        let mut stage = Stage::new(Look { verbosity: Verbosity::Verbose, ..PLAIN }, None);
        stage.show(0, started(0));
        let reason = "rank 1 on a exited with status 3; restart 1 of 2 follows in 1.0 s".to_owned();
        stage.show(0, Event::Restarting { generation: 1, after: Duration::from_secs(1), reason });
        assert_eq!(
            stage.stderr.text(),
            "deuteron: rank 0 is on a (127.0.0.1), local rank 0 of 1\n\
             deuteron: rank 1 on a exited with status 3; restart 1 of 2 follows in 1.0 s\n"
        );
    }

    #[test]
    fn files_hold_the_bare_lines_of_all_generations() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::create(folder.path().join("logs"), 11).unwrap();
        let mut stage = Stage::new(PLAIN, Some(files));
        stage.show(0, started(0));
        stage.show(0, output(3, Stream::Stdout, "first\n"));
        stage.show(0, started(1));
        stage.show(0, output(3, Stream::Stdout, "second\n"));
        let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
        assert_eq!(
            read("logs/rank.03/stdout"),
            "first\ndeuteron: generation 1 starts here\nsecond\n"
        );
        assert_eq!(read("logs/rank.10/stderr"), "deuteron: generation 1 starts here\n");
        assert_eq!(stage.stdout.text(), "[3] first\n[3] second\n");
    }

    #[test]
    fn many_files_are_not_all_open() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::create(folder.path().into(), 300).unwrap();
        for _ in 0..2 {
            for rank in 0..300 {
                files.write(rank, Stream::Stdout, b"", b"x\n").unwrap();
                assert!(files.open.len() <= OPEN_FILES);
            }
        }
        let path = folder.path().join("rank.007/stdout");
        assert_eq!(fs::read_to_string(path).unwrap(), "x\nx\n");
    }

    #[test]
    fn a_full_disk_does_not_end_the_job() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::create(folder.path().join("logs"), 1).unwrap();
        fs::remove_dir_all(folder.path().join("logs")).unwrap();
        let mut stage = Stage::new(PLAIN, Some(files));
        stage.show(0, output(0, Stream::Stdout, "a\n"));
        stage.show(0, output(0, Stream::Stdout, "b\n"));
        assert_eq!(stage.stdout.text(), "[0] a\n[0] b\n");
        assert_eq!(stage.stderr.text().matches("goes on without these files").count(), 1);
    }

    #[test]
    fn a_reader_that_left_is_noticed() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let stdout = Descriptor::of(writer.as_fd()).unwrap();
        let stderr = Shared::default();
        let mut printer = Printer::new(PLAIN, Box::new(stdout), Box::new(stderr.clone()), None);
        let event = output(0, Stream::Stdout, "x\n");
        let shown = printer.event(event.clone(), Instant::now(), SystemTime::now());
        assert_eq!(shown, Err(Closed::ByReader));
        assert_eq!(printer.event(event, Instant::now(), SystemTime::now()), Ok(()));
        assert_eq!(stderr.text(), "");
    }

    #[test]
    fn a_slow_reader_of_a_non_blocking_pipe_loses_nothing() {
        use std::io::Read;
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let mut descriptor = Descriptor::of(writer.as_fd()).unwrap();
        drop(writer);
        let thread = std::thread::spawn(move || {
            descriptor.write_all(&vec![b'x'; 1 << 20]).unwrap();
        });
        std::thread::sleep(Duration::from_millis(50));
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        thread.join().unwrap();
        assert_eq!(bytes.len(), 1 << 20);
    }
}
