//! The texts that users write for durations, sizes and hosts.

use deuteron_gang::Host;
use std::{collections::BTreeMap, time::Duration};

/// `60s`, `2m`, `1.5h`, `250ms`, or seconds without a unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; write 90, 90s, 1.5m, 2h or 250ms");
    let (number, unit) = split_unit(text).ok_or_else(wrong)?;
    let scale = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(number * scale)
        .ok()
        .filter(|duration| *duration <= Duration::from_secs(10 * 365 * 86400))
        .ok_or_else(|| format!("{text:?} is too long"))
}

/// `80GB`, `16GiB`, or bytes without a unit.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; write 80GB, 16GiB, 512MiB or bytes");
    let (number, unit) = split_unit(text).ok_or_else(wrong)?;
    let scale: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(wrong()),
    };
    let bytes = (number * scale).round();
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("{text:?} is too much")) }
}

fn split_unit(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

/// Hosts with their slots: `a:4`, `[fe80::1]:2`, or `a` for one slot.
pub(crate) fn hosts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for text in texts.into_iter().map(str::trim).filter(|text| !text.is_empty()) {
        add(&mut hosts, host(text)?)?;
    }
    if hosts.is_empty() { Err("no host is named".into()) } else { Ok(hosts) }
}

/// A file of hosts: `a slots=4`, `a:4` or `a` on a line each; `#` starts a comment.
pub(crate) fn hostfile(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        hostfile_line(line)
            .and_then(|host| add(&mut hosts, host))
            .map_err(|problem| format!("line {}: {problem}", number + 1))?;
    }
    if hosts.is_empty() { Err("no host is named".into()) } else { Ok(hosts) }
}

fn hostfile_line(line: &str) -> Result<Host, String> {
    let mut words = line.split_whitespace();
    let mut host = host(words.next().unwrap_or_default())?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) => host.slots = slots(count)?,
            // Open MPI's files have it beside the slots; a host never takes more than its slots here.
            Some(("max_slots" | "max-slots", _)) => {}
            _ => return Err(format!("{word:?} is unknown; write `{} slots=4`", host.name)),
        }
    }
    Ok(host)
}

fn host(text: &str) -> Result<Host, String> {
    let (name, count) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => (address, rest.strip_prefix(':')),
        // More than one colon is an address of version 6 without brackets, which cannot carry slots.
        None if text.matches(':').count() == 1 => match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (text, None),
        },
        None => (text, None),
    };
    // A name that starts with a dash would be an option of ssh.
    if name.is_empty() || name.starts_with('-') || name.contains(char::is_whitespace) {
        return Err(format!("{text:?} is not a host; write name:slots, as in node1:4"));
    }
    Ok(Host { name: name.into(), slots: count.map_or(Ok(1), slots)? })
}

fn slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("a host with 0 slots takes no task; leave it out".into()),
        Ok(count) => Ok(count),
        Err(_) => Err(format!("{text:?} is not a number of slots")),
    }
}

fn add(hosts: &mut Vec<Host>, new: Host) -> Result<(), String> {
    if let Some(old) = hosts.iter().find(|host| host.name.eq_ignore_ascii_case(&new.name)) {
        return Err(format!(
            "{} is named twice; name it once, as {}:{}",
            new.name,
            new.name,
            old.slots.saturating_add(new.slots)
        ));
    }
    hosts.push(new);
    Ok(())
}

/// `K=V`, for a task's environment.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err(format!("{text:?} is not NAME=VALUE")),
    }
}

/// Later pairs replace earlier ones of the same name.
pub(crate) fn unique(pairs: Vec<(String, String)>) -> Vec<(String, String)> {
    pairs.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect()
}

/// `1 task`, `3 tasks`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(hosts: &[Host]) -> Vec<(&str, u32)> {
        hosts.iter().map(|host| (host.name.as_str(), host.slots)).collect()
    }

    #[test]
    fn durations() {
        for (text, milliseconds) in [
            ("60", 60_000),
            ("60s", 60_000),
            ("2m", 120_000),
            ("2min", 120_000),
            ("1.5h", 5_400_000),
            ("250ms", 250),
            (" 3 s", 3_000),
            ("0", 0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "s", "-1s", "1 week", "1.2.3", "1e3", "99999999999999h", "nan", "inf"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes() {
        for (text, count) in [
            ("0", 0),
            ("1024", 1024),
            ("80GB", 80_000_000_000),
            ("80gb", 80_000_000_000),
            ("16GiB", 16 << 30),
            ("1.5 MiB", 3 << 19),
        ] {
            assert_eq!(bytes(text), Ok(count), "{text}");
        }
        for text in ["", "GB", "-1", "12 parsecs", "99999999999TiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn lists_of_hosts() {
        let hosts = |text: &str| hosts(text.split(','));
        let found = hosts("a:2, b:3,c").unwrap();
        assert_eq!(named(&found), [("a", 2), ("b", 3), ("c", 1)]);
        assert_eq!(named(&hosts("[fe80::1]:4,::1").unwrap()), [("fe80::1", 4), ("::1", 1)]);
        assert_eq!(named(&hosts("user@a:4").unwrap()), [("user@a", 4)]);
        for (text, problem) in [
            ("", "no host"),
            ("a:0", "takes no task"),
            ("a:x", "not a number of slots"),
            (":2", "not a host"),
            ("-oProxyCommand=x:2", "not a host"),
            ("a:2,A:3", "A is named twice; name it once, as A:5"),
        ] {
            let error = hosts(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn files_of_hosts() {
        let text =
            "# the rack\n\nnode1 slots=4\nnode2:2 # new\n  node3\nnode4 slots=1 max_slots=8\n";
        let found = hostfile(text).unwrap();
        assert_eq!(named(&found), [("node1", 4), ("node2", 2), ("node3", 1), ("node4", 1)]);
        for (text, problem) in [
            ("# nothing\n", "no host"),
            ("a\n\na slots=2\n", "line 3: a is named twice"),
            ("a slot=2\n", "line 1: \"slot=2\" is unknown"),
            ("a slots=none\n", "line 1: \"none\" is not a number of slots"),
        ] {
            let error = hostfile(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn pairs() {
        assert_eq!(pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(pair("A="), Ok(("A".into(), String::new())));
        assert!(pair("A").is_err());
        assert!(pair("=b").is_err());
        let twice = vec![pair("A=1").unwrap(), pair("A=2").unwrap()];
        assert_eq!(unique(twice), [("A".into(), "2".into())]);
    }
}
