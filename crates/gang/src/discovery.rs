//! How a host finds its accelerators, and how a task is shown only its own.
//!
//! Discovery never fails: what does not work becomes a line for the user, and its devices are not offered.

use crate::{Accelerator, error::seconds};
use nvml_wrapper::{Nvml, error::NvmlError};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use serde::{Deserialize, Serialize};
use std::{
    env,
    io::{self, Read},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

const SCRIPT_LIMIT: Duration = Duration::from_secs(10);
const SCRIPT_OUTPUT: usize = 64 * 1024;
const GPU: &str = "gpu";
const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Where to look for accelerators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// NVIDIA's management library, loaded at run time.
    Nvml,
    /// A program that prints what there is, as Spark's discovery scripts do: `{"name": "gpu", "addresses": ["0", "1"]}`.
    /// Instead of addresses it may print `"devices": [{"index": 0, "model": "U250", "uuid": "…", "memory": 64}]`, where
    /// only the index is required and memory is in bytes.
    Script {
        /// The program.
        path: PathBuf,
        /// What it lists; its `name` must be the same.
        kind: String,
    },
    /// Exactly these, whatever the host has.
    List(Vec<Accelerator>),
}

/// What discovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovered {
    /// Each device once, in the order of the sources.
    pub accelerators: Vec<Accelerator>,
    /// What did not work, a line each.
    pub problems: Vec<String>,
}

/// Asks all sources. GPUs that `CUDA_VISIBLE_DEVICES` hides from this process are left out, unless they are on a list.
///
/// ```
/// use deuteron_gang::{Accelerator, discovery::{Source, discover}};
///
/// let card = Accelerator { kind: "fpga".into(), model: "U250".into(), index: 0, uuid: String::new(), memory: 0 };
/// let found = discover(&[Source::List(vec![card.clone()]), Source::List(vec![card.clone()])]);
/// assert_eq!(found.accelerators, [card]);
/// ```
pub fn discover(sources: &[Source]) -> Discovered {
    let limit = env::var(CUDA_VISIBLE_DEVICES).ok();
    let mut found = Discovered::default();
    for source in sources {
        let devices = match source {
            Source::Nvml => nvml(&mut found.problems),
            Source::Script { path, kind } => {
                script(path, kind, SCRIPT_LIMIT).unwrap_or_else(|problem| {
                    found.problems.push(format!("discovery script {}: {problem}", path.display()));
                    Vec::new()
                })
            }
            Source::List(devices) => devices.clone(),
        };
        let devices = match (source, &limit) {
            (Source::List(_), _) | (_, None) => devices,
            (_, Some(limit)) => visible_here(devices, limit, &mut found.problems),
        };
        for device in devices {
            if !found.accelerators.iter().any(|known| known.is_same(&device)) {
                found.accelerators.push(device);
            }
        }
    }
    found
}

/// The devices that `text` lists, as a script would print them, and nothing else; NVML adds what it knows of them.
pub(crate) fn assigned(text: &str) -> Discovered {
    let mut found = Discovered::default();
    let name = serde_json::from_str::<Answer>(text).map(|answer| answer.name).unwrap_or_default();
    match parse(text.as_bytes(), &name) {
        Ok(devices) => found.accelerators = devices,
        Err(problem) => found.problems.push(format!("the list of assigned accelerators {problem}")),
    }
    if found.accelerators.iter().any(|device| device.kind == GPU && device.model.is_empty()) {
        let known = nvml(&mut found.problems);
        for device in found.accelerators.iter_mut().filter(|device| device.kind == GPU) {
            // An address is a number, or the beginning of a UUID.
            let same = |gpu: &&Accelerator| match device.uuid.is_empty() {
                true => gpu.index == device.index,
                false => gpu.uuid.starts_with(&device.uuid),
            };
            if let Some(gpu) = known.iter().find(same) {
                *device = gpu.clone();
            }
        }
    }
    found
}

/// The environment that shows a task its own accelerators of this kind and no others; without any it sees none.
///
/// ```
/// use deuteron_gang::discovery::visible;
///
/// assert_eq!(visible("gpu", &[])[0], ("CUDA_VISIBLE_DEVICES".to_owned(), String::new()));
/// assert_eq!(visible("fpga", &[])[0].0, "DEUTERON_FPGA_VISIBLE_DEVICES");
/// ```
pub fn visible(kind: &str, accelerators: &[Accelerator]) -> Vec<(String, String)> {
    let own: Vec<&Accelerator> =
        accelerators.iter().filter(|device| device.kind.eq_ignore_ascii_case(kind)).collect();
    // Programs parse numbers more often than UUIDs. But what is known by its UUID alone has no number of its own, nor
    // has a slice of a GPU; and CUDA does not take both in one list.
    let is_unnumbered =
        |device: &&Accelerator| device.model.is_empty() || device.uuid.starts_with("MIG-");
    let by_uuid = own.iter().all(|device| !device.uuid.is_empty()) && own.iter().any(is_unnumbered);
    let names: Vec<String> = own
        .iter()
        .map(|device| if by_uuid { device.uuid.clone() } else { device.index.to_string() })
        .collect();
    let names = names.join(",");
    if kind.eq_ignore_ascii_case(GPU) {
        // NVML counts by bus; CUDA alone would count the fastest first.
        vec![
            (CUDA_VISIBLE_DEVICES.into(), names),
            ("CUDA_DEVICE_ORDER".into(), "PCI_BUS_ID".into()),
        ]
    } else {
        let kind = kind.to_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        vec![(format!("DEUTERON_{kind}_VISIBLE_DEVICES"), names)]
    }
}

/// Leaves out the GPUs that `limit`, a value of `CUDA_VISIBLE_DEVICES`, hides. As in CUDA, an entry is a number or the
/// beginning of a UUID, and an entry that names no device ends the list.
fn visible_here(
    devices: Vec<Accelerator>,
    limit: &str,
    problems: &mut Vec<String>,
) -> Vec<Accelerator> {
    let (gpus, mut devices): (Vec<_>, Vec<_>) =
        devices.into_iter().partition(|device| device.kind == GPU);
    if gpus.is_empty() {
        return devices;
    }
    for entry in limit.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let named = gpus.iter().find(|gpu| match entry.parse::<u32>() {
            Ok(index) => gpu.index == index,
            Err(_) => gpu.uuid.starts_with(entry),
        });
        let Some(gpu) = named else {
            if entry != "-1" {
                problems.push(format!(
                    "{CUDA_VISIBLE_DEVICES}={limit} names {entry}, and there is no such GPU"
                ));
            }
            break;
        };
        if !devices.iter().any(|device| device.is_same(gpu)) {
            devices.push(gpu.clone());
        }
    }
    if devices.is_empty() {
        problems.push(format!(
            "{CUDA_VISIBLE_DEVICES}={limit} hides all {} GPUs: unset or change it",
            gpus.len()
        ));
    }
    devices
}

fn nvml(problems: &mut Vec<String>) -> Vec<Accelerator> {
    let all = || -> Result<(Nvml, u32), NvmlError> {
        let nvml = Nvml::init()?;
        let count = nvml.device_count()?;
        Ok((nvml, count))
    };
    let (nvml, count) = match all() {
        Ok(all) => all,
        Err(error) => {
            problems.push(format!(
                "NVML finds no GPUs (if there are some, install NVIDIA's driver): {error}"
            ));
            return Vec::new();
        }
    };
    let one = |index| -> Result<Accelerator, NvmlError> {
        let device = nvml.device_by_index(index)?;
        // Old drivers do not tell the memory this way; the device is there all the same.
        let memory = device.memory_info().map_or(0, |memory| memory.total);
        Ok(Accelerator {
            kind: GPU.into(),
            model: device.name()?,
            index,
            uuid: device.uuid()?,
            memory,
        })
    };
    let mut devices = Vec::new();
    for index in 0..count {
        match one(index) {
            Ok(device) => devices.push(device),
            Err(error) => problems.push(format!("NVML cannot read GPU {index}: {error}")),
        }
    }
    devices
}

#[derive(Deserialize)]
struct Answer {
    name: String,
    addresses: Option<Vec<String>>,
    devices: Option<Vec<Device>>,
}

#[derive(Deserialize)]
struct Device {
    index: u32,
    #[serde(default)]
    model: String,
    #[serde(default)]
    uuid: String,
    #[serde(default)]
    memory: u64,
}

fn script(path: &Path, kind: &str, limit: Duration) -> Result<Vec<Accelerator>, String> {
    let child = Command::new(path)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot be started: {error}"))?;
    let mut script = Script { child, stdout: Vec::new(), stderr: Vec::new() };
    let end = script.wait(limit);
    let printed = script.printed();
    match end {
        Ok(End::Exited(status)) if status.success() => {
            parse(&script.stdout, kind).map_err(|error| format!("{error}{printed}"))
        }
        Ok(End::Exited(status)) => Err(format!("failed with {status}{printed}")),
        Ok(End::Late) => Err(format!("was killed after {}{printed}", seconds(limit))),
        Ok(End::Loud) => {
            Err(format!("was killed because it printed more than {SCRIPT_OUTPUT} bytes{printed}"))
        }
        Err(error) => Err(format!("cannot be waited for: {error}")),
    }
}

fn parse(stdout: &[u8], kind: &str) -> Result<Vec<Accelerator>, String> {
    let answer: Answer = serde_json::from_slice(stdout).map_err(|error| {
        format!(r#"did not print {{"name": "{kind}", "addresses": ["0", …]}}: {error}"#)
    })?;
    if !answer.name.eq_ignore_ascii_case(kind) {
        return Err(format!("lists {:?} and was asked for {kind:?}", answer.name));
    }
    if answer.addresses.is_none() && answer.devices.is_none() {
        return Err("printed neither addresses nor devices".into());
    }
    let addressed = (0..).zip(answer.addresses.unwrap_or_default()).map(|(position, address)| {
        let (index, uuid) =
            address.parse().map_or((position, address), |index| (index, String::new()));
        Device { index, uuid, model: String::new(), memory: 0 }
    });
    let devices = addressed.chain(answer.devices.unwrap_or_default());
    Ok(devices
        .map(|Device { index, model, uuid, memory }| Accelerator {
            kind: kind.to_ascii_lowercase(),
            model,
            index,
            uuid,
            memory,
        })
        .collect())
}

/// A running script; it and what it started in its process group end when this is dropped.
struct Script {
    child: Child,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

enum End {
    Exited(ExitStatus),
    Late,
    Loud,
}

impl Script {
    fn wait(&mut self, limit: Duration) -> io::Result<End> {
        let deadline = Instant::now() + limit;
        let exit = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let (mut stdout, mut stderr) = (self.child.stdout.take(), self.child.stderr.take());
        for pipe in [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)]
            .into_iter()
            .flatten()
        {
            ioctl_fionbio(pipe, true)?;
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(End::Late);
            }
            let mut ready = vec![PollFd::new(&exit, PollFlags::IN)];
            ready.extend(stdout.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            ready.extend(stderr.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            let timeout = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut ready, Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let has_exited = !ready[0].revents().is_empty();
            drain(&mut stdout, &mut self.stdout)?;
            drain(&mut stderr, &mut self.stderr)?;
            if self.stdout.len().max(self.stderr.len()) > SCRIPT_OUTPUT {
                return Ok(End::Loud);
            }
            if has_exited {
                // The rest of its group first: once the script is reaped, the number may be another's.
                self.kill_group();
                return Ok(End::Exited(self.child.wait()?));
            }
        }
    }

    fn kill_group(&self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }

    /// The end of what it printed, for a message.
    fn printed(&self) -> String {
        let text = if self.stderr.trim_ascii().is_empty() { &self.stdout } else { &self.stderr };
        let text = text.trim_ascii();
        if text.is_empty() {
            return "; it printed nothing".into();
        }
        let end = &text[text.len().saturating_sub(500)..];
        format!("; it printed: {}", String::from_utf8_lossy(end))
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.kill_group();
            let _ = self.child.wait();
        }
    }
}

/// Takes what is there, a little more than the bound at most; at its end the pipe is closed.
fn drain(pipe: &mut Option<impl Read>, into: &mut Vec<u8>) -> io::Result<()> {
    let Some(reader) = pipe else { return Ok(()) };
    let room = (SCRIPT_OUTPUT + 1).saturating_sub(into.len());
    match reader.take(room as u64).read_to_end(into) {
        Ok(_) => *pipe = None,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::gpu;
    use std::{fs, process, sync::atomic::AtomicU32, sync::atomic::Ordering::Relaxed};

    /// A script file that goes away with the test.
    struct File(PathBuf);

    impl File {
        fn new(body: &str) -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name =
                format!("deuteron-discovery-{}-{}", process::id(), NEXT.fetch_add(1, Relaxed));
            let path = env::temp_dir().join(name);
            // Written by another process: a test that forks while this one had it open would make it "busy".
            let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$2\" && chmod +x \"$2\"";
            let written = Command::new("sh").args(["-c", write, "sh", body]).arg(&path).status();
            assert!(written.unwrap().success());
            Self(path)
        }

        fn run(&self, kind: &str) -> Result<Vec<Accelerator>, String> {
            script(&self.0, kind, SCRIPT_LIMIT)
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn device(kind: &str, index: u32, uuid: &str) -> Accelerator {
        Accelerator { kind: kind.into(), model: String::new(), index, uuid: uuid.into(), memory: 0 }
    }

    #[test]
    fn scripts_speak_as_to_spark_or_say_more() {
        let found = File::new(r#"echo '{"name":"gpu","addresses":["0","2"]}'"#).run("gpu").unwrap();
        assert_eq!(found, [device("gpu", 0, ""), device("gpu", 2, "")]);

        let found = File::new(r#"echo '{"name":"fpga","addresses":["0000:3b:00.0","x"]}'"#)
            .run("FPGA")
            .unwrap();
        assert_eq!(found, [device("fpga", 0, "0000:3b:00.0"), device("fpga", 1, "x")]);

        let body = r#"echo '{"name":"fpga","devices":[{"index":3,"model":"U250","memory":64},{"index":4}]}'"#;
        let found = File::new(body).run("fpga").unwrap();
        let named = Accelerator { model: "U250".into(), memory: 64, ..device("fpga", 3, "") };
        assert_eq!(found, [named, device("fpga", 4, "")]);

        assert_eq!(File::new(r#"echo '{"name":"gpu","addresses":[]}'"#).run("gpu").unwrap(), []);
    }

    #[test]
    fn what_a_script_does_wrong_is_told_with_what_it_printed() {
        let cases = [
            ("echo no card >&2; exit 3", "failed with exit status: 3; it printed: no card"),
            ("kill -9 $$", "failed with signal: 9 (SIGKILL); it printed nothing"),
            ("echo hello", "did not print {\"name\": \"gpu\""),
            ("echo hello", "it printed: hello"),
            ("true", "it printed nothing"),
            (r#"echo '{"name":"tpu","addresses":[]}'"#, "lists \"tpu\" and was asked for \"gpu\""),
            (r#"echo '{"name":"gpu"}'"#, "printed neither addresses nor devices"),
            ("yes", "printed more than 65536 bytes"),
            ("yes >&2", "printed more than 65536 bytes"),
        ];
        for (body, expected) in cases {
            let error = File::new(body).run("gpu").unwrap_err();
            assert!(error.contains(expected), "{body}: {error}");
        }
        let nowhere = Source::Script { path: "/nowhere/gpus".into(), kind: "gpu".into() };
        let found = discover(&[nowhere]);
        assert_eq!(found.accelerators, []);
        assert!(
            found.problems[0].starts_with("discovery script /nowhere/gpus: cannot be started: "),
            "{found:?}"
        );
    }

    #[test]
    fn a_script_that_hangs_is_killed_with_its_children() {
        let file = File::new("sleep 3600 & echo $!; wait");
        let error = script(&file.0, "gpu", Duration::from_millis(300)).unwrap_err();
        let child = error.strip_prefix("was killed after 0.3 s; it printed: ").expect(&error);
        assert!(has_ended(child));
    }

    #[test]
    fn a_child_that_keeps_the_pipe_does_not_keep_the_answer() {
        let begun = Instant::now();
        let body = r#"sleep 3600 & echo "{\"name\":\"gpu\",\"addresses\":[\"pid-$!\"]}""#;
        let found = File::new(body).run("gpu").unwrap();
        assert!(begun.elapsed() < SCRIPT_LIMIT / 2);
        assert!(has_ended(found[0].uuid.trim_start_matches("pid-")));
    }

    fn has_ended(pid: &str) -> bool {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            // A zombie waits for init alone.
            let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if status.is_empty() || status.contains(") Z ") {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    #[test]
    fn what_was_assigned_is_all_there_is() {
        let found = assigned(r#"{"name":"fpga","addresses":["3","x"]}"#);
        assert_eq!(found.accelerators, [device("fpga", 3, ""), device("fpga", 1, "x")]);
        assert_eq!(found.problems, [""; 0]);
        let wrong = assigned("nothing");
        assert_eq!(wrong.accelerators, []);
        assert!(wrong.problems[0].starts_with("the list of assigned accelerators "), "{wrong:?}");
    }

    #[test]
    fn a_device_of_two_sources_counts_once() {
        let bare = device("gpu", 1, "");
        let other = device("fpga", 1, "");
        let lists = [
            vec![gpu(0, "H200"), gpu(1, "H200")],
            vec![gpu(1, "H200"), bare, other.clone(), gpu(2, "H200")],
        ];
        let found = discover(&lists.map(Source::List));
        assert_eq!(found.accelerators, [gpu(0, "H200"), gpu(1, "H200"), other, gpu(2, "H200")]);
        assert_eq!(found.problems, [""; 0]);
    }

    #[test]
    fn without_the_library_there_are_no_gpus_and_a_line() {
        let found = discover(&[Source::Nvml]);
        println!("{found:#?}");
        assert!(!found.accelerators.is_empty() || !found.problems.is_empty());
        assert!(
            found.accelerators.iter().all(|device| device.kind == GPU && !device.model.is_empty())
        );
    }

    #[test]
    fn cuda_visible_devices_is_the_upper_limit() {
        let all = || vec![gpu(0, "A"), gpu(1, "A"), gpu(2, "A"), device("fpga", 0, "")];
        for (limit, expected, problem) in [
            ("0,1,2", &[0, 1, 2][..], ""),
            ("2, 0", &[2, 0], ""),
            ("1,1", &[1], ""),
            ("GPU-1", &[1], ""),
            ("", &[], ""),
            ("-1", &[], ""),
            ("1,-1,2", &[1], ""),
            ("1,7,2", &[1], "CUDA_VISIBLE_DEVICES=1,7,2 names 7, and there is no such GPU"),
            ("MIG-1", &[], "CUDA_VISIBLE_DEVICES=MIG-1 names MIG-1, and there is no such GPU"),
        ] {
            let mut problems = Vec::new();
            let found = visible_here(all(), limit, &mut problems);
            let (fpgas, gpus): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|device| device.kind == "fpga");
            assert_eq!(fpgas.len(), 1);
            assert_eq!(gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), expected, "{limit:?}");
            assert_eq!(problems.concat(), problem);
        }
        let mut problems = Vec::new();
        assert_eq!(visible_here(vec![gpu(0, "A")], "", &mut problems), []);
        assert_eq!(problems, ["CUDA_VISIBLE_DEVICES= hides all 1 GPUs: unset or change it"]);
    }

    #[test]
    fn tasks_see_numbers_where_there_are_some() {
        let shown = |kind, devices: &[Accelerator]| visible(kind, devices).swap_remove(0).1;
        assert_eq!(shown("gpu", &[gpu(3, "A"), gpu(1, "A"), device("fpga", 0, "")]), "3,1");
        assert_eq!(shown("gpu", &[device("gpu", 2, "")]), "2");
        assert_eq!(shown("gpu", &[device("gpu", 0, "GPU-x"), gpu(1, "A")]), "GPU-x,GPU-1");
        let slice = Accelerator { uuid: "MIG-7".into(), ..gpu(0, "A") };
        assert_eq!(shown("gpu", &[slice]), "MIG-7");
        assert_eq!(shown("gpu", &[]), "");
        assert_eq!(visible("gpu", &[])[1], ("CUDA_DEVICE_ORDER".into(), "PCI_BUS_ID".into()));
        let cards = [device("my-card", 0, "0000:3b:00.0")];
        let expected = ("DEUTERON_MY_CARD_VISIBLE_DEVICES".to_owned(), "0000:3b:00.0".to_owned());
        assert_eq!(visible("my-card", &cards), [expected]);
    }
}
