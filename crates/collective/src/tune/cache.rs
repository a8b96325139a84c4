//! What was measured, kept in a small file per kind of machine and group (TUNE-3).

use super::Constants;
use crate::Group;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

/// A file longer than this is not ours.
const MAX_BYTES: u64 = 16 << 10;

/// All that the constants of a group depend on, in one line.
pub(crate) fn key(group: &Group) -> String {
    let ranks = group.size();
    let hosts: BTreeSet<&str> = (0..ranks).map(|rank| group.host(rank)).collect();
    let transport = if group.shares_memory() {
        "shared memory".to_owned()
    } else {
        let tiers = if group.inner.topology.tiered { ", shared memory inside" } else { "" };
        format!("{} between {} hosts{tiers}", group.inner.options.security.name(), hosts.len())
    };
    let cores = group.inner.topology.cores;
    let version = env!("CARGO_PKG_VERSION");
    format!("{} · {cores} cores · {ranks} ranks · {transport} · deuteron {version}", processor())
}

/// The name of this machine's processor, or what kind it is.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| {
        let (field, value) = line.split_once(':')?;
        (field.trim() == "model name").then(|| value.trim().to_owned())
    });
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// One file and what it is about.
pub(crate) struct Place {
    file: PathBuf,
    key: String,
}

impl Place {
    pub fn new(folder: &Path, key: &str) -> Self {
        let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { file: folder.join(format!("tuning-{hash:016x}.txt")), key: key.to_owned() }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is kept, if it is there and whole.
    pub fn read(&self) -> Option<Constants> {
        let metadata = fs::metadata(&self.file).ok()?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            return None;
        }
        let read = fs::read_to_string(&self.file).ok().and_then(|text| parse(&text, &self.key));
        if read.is_none() {
            tracing::info!("{} is not readable, and measured anew", self.file.display());
        }
        read
    }

    /// Keeps what was measured: whole, or not at all.
    pub fn write(&self, constants: &Constants) {
        let written = self.try_write(&text(&self.key, constants));
        if let Err(error) = written {
            tracing::info!("what was measured is not kept in {}: {error}", self.file.display());
        }
    }

    fn try_write(&self, text: &str) -> io::Result<()> {
        if let Some(folder) = self.file.parent() {
            fs::create_dir_all(folder)?;
        }
        // Another job may write at the same time: each has a name of its own, and the last one stays.
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("txt.{:016x}", u64::from_ne_bytes(random));
        let temporary = self.file.with_extension(name);
        fs::write(&temporary, text)
            .and_then(|()| fs::rename(&temporary, &self.file))
            .inspect_err(|_| drop(fs::remove_file(&temporary)))
    }
}

fn text(key: &str, constants: &Constants) -> String {
    let mut text = String::from(
        "# What deuteron measured on this host, in bytes and nanoseconds. Delete it to have it measured anew.\n",
    );
    let _ = writeln!(text, "key = {key}");
    for (name, number) in Constants::NAMES.iter().zip(constants.numbers()) {
        let _ = writeln!(text, "{name} = {number}");
    }
    text
}

fn parse(text: &str, key: &str) -> Option<Constants> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let pairs: BTreeMap<&str, &str> =
        lines.map(|line| line.split_once(" = ")).collect::<Option<_>>()?;
    if pairs.get("key") != Some(&key) || pairs.len() != Constants::NAMES.len() + 1 {
        return None;
    }
    let mut constants = Constants::UNKNOWN;
    for (slot, name) in constants.numbers_mut().into_iter().zip(Constants::NAMES) {
        *slot = pairs.get(name)?.parse().ok()?;
    }
    Some(constants)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("deuteron-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700));
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn some() -> Constants {
        Constants { exchange: 1234.5, copy: 1e-3, ..Constants::UNKNOWN }
    }

    fn bits(constants: &Constants) -> [u64; 25] {
        constants.numbers().map(f64::to_bits)
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_lies_there() {
        let folder = Folder::new("cache");
        let place = Place::new(&folder.0.join("made/on/demand"), "a machine");
        assert!(place.read().is_none());
        place.write(&some());
        place.write(&some());
        assert_eq!(place.read().map(|read| bits(&read)), Some(bits(&some())));
        assert_eq!(fs::read_dir(place.file().parent().unwrap()).unwrap().count(), 1);
        let other = Place::new(place.file().parent().unwrap(), "another machine");
        assert!(other.read().is_none());
        fs::copy(place.file(), other.file()).unwrap();
        assert!(other.read().is_none(), "the file is about another machine");
    }

    #[test]
    fn a_broken_file_is_nothing() {
        let whole = text("a machine", &some());
        assert!(parse(&whole, "a machine").is_some());
        let lines: Vec<&str> = whole.lines().collect();
        for end in 0..lines.len() {
            assert!(parse(&lines[..end].join("\n"), "a machine").is_none(), "{end} lines");
        }
        for (from, to) in [("1234.5", "fast"), (" = ", "="), ("copy", "cope"), ("1234.5", "")] {
            assert!(parse(&whole.replacen(from, to, 1), "a machine").is_none(), "{to}");
        }
        assert!(parse(&format!("{whole}more = 1\n"), "a machine").is_none());
        let folder = Folder::new("broken");
        let place = Place::new(&folder.0, "a machine");
        fs::create_dir_all(&folder.0).unwrap();
        fs::write(place.file(), [0xff, 0xfe, 0]).unwrap();
        assert!(place.read().is_none());
        fs::write(place.file(), whole.repeat(100)).unwrap();
        assert!(place.read().is_none());
        fs::remove_file(place.file()).unwrap();
        fs::create_dir(place.file()).unwrap();
        assert!(place.read().is_none());
        place.write(&some());
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "the temporary file is gone");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let place = Place::new(Path::new("/proc/deuteron"), "a machine");
        place.write(&some());
        assert!(place.read().is_none());
    }
}
