//! `deuteron bench` as its user starts it.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Ended, Launch, Terminal};
use serde_json::Value;
use std::{fs, process::Command};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");

/// Runs it with a cache of its own.
fn bench(cache: &Directory, words: &[&str]) -> Ended {
    let mut command = Command::new(DEUTERON);
    command.arg("bench").args(words).env("XDG_CACHE_HOME", cache.path());
    Launch::start(command).end()
}

/// What went to standard output.
fn output(ended: &Ended) -> String {
    let lines = ended.lines.iter().filter(|line| !line.starts_with("LOG "));
    lines.map(|line| format!("{line}\n")).collect()
}

fn json(ended: &Ended) -> Value {
    ended.expect(0, &[]);
    serde_json::from_str(&output(ended)).unwrap()
}

#[test]
fn two_ranks_print_every_size_with_a_reason() {
    let _case = Case::within(60);
    let cache = Directory::new();
    let ended = bench(&cache, &["-n", "2", "--sizes", "8,64KiB,1MiB"]);
    ended.expect(0, &["LOG deuteron: 2 tasks on 1 host succeeded"]);
    let text = output(&ended);
    let [first, constants, ..] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert!(first.starts_with("2 ranks on 1 host ("), "{text}");
    assert!(constants.starts_with("exchange ") && constants.contains("measured now, kept in"));
    for operation in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"] {
        for size in ["8 B", "64 KiB", "1 MiB"] {
            for memory in ["plain", "registered"] {
                let row = text.lines().find(|line| {
                    line.starts_with(operation)
                        && line.contains(&format!(" {size} "))
                        && line.contains(memory)
                });
                let row =
                    row.unwrap_or_else(|| panic!("no {operation} of {size}, {memory}: {text}"));
                let reasons = ["it fits", "small: ", "large: ", "the memory is", "shared memory: "];
                assert!(reasons.iter().any(|reason| row.contains(reason)), "{row}");
                assert!(row.contains("B/s"), "{row}");
            }
        }
    }
    assert!(text.lines().any(|line| line.starts_with("barrier ")), "{text}");
    assert!(text.contains("\n  one_shot ") && text.contains("\n  chunk "), "{text}");

    // What was measured is used again, and rank 0 has kept one file.
    let again = bench(&cache, &["-n", "2", "--sizes", "8", "--operations", "barrier"]);
    again.expect(0, &["as measured before, kept in"]);
    assert_eq!(fs::read_dir(cache.path().join("deuteron")).unwrap().count(), 1);
}

#[test]
fn json_holds_everything() {
    let _case = Case::within(60);
    let cache = Directory::new();
    let words = ["-n", "3", "--sizes", "1KiB,300KB", "--dtype", "bf16", "--json"];
    let found = json(&bench(&cache, &words));
    assert_eq!((&found["ranks"], &found["dtype"]), (&3.into(), &"bf16".into()));
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5 * 2 * 2 + 1);
    for row in rows {
        let [least, median, most] = ["least_seconds", "median_seconds", "most_seconds"]
            .map(|name| row[name].as_f64().unwrap());
        assert!(0.0 < least && least <= median && median <= most, "{row}");
        assert!(!row["reason"].as_str().unwrap().is_empty(), "{row}");
        assert!(row["calls"].as_u64().unwrap() >= 5, "{row}");
    }
    let thresholds = found["tuning"]["thresholds"].as_array().unwrap();
    assert_eq!(thresholds.len(), 2, "{thresholds:?}");

    let words = ["-n", "2", "--sizes", "8", "--tuning", "off", "--json", "--quiet"];
    let ended = bench(&cache, &words);
    assert!(json(&ended)["tuning"].is_null());
    assert!(!ended.lines.iter().any(|line| line.starts_with("LOG ")), "{ended:?}");
}

#[test]
fn one_rank_is_a_gang_too() {
    let _case = Case::within(30);
    let ended = bench(&Directory::new(), &["-n", "1", "--sizes", "8", "--dtype", "i64"]);
    ended.expect(0, &["1 rank on 1 host", "there is one rank"]);
}

#[test]
fn what_is_wrong_is_said_before_anything_starts() {
    let _case = Case::within(30);
    let cache = Directory::new();
    for (words, said) in [
        (vec!["--sizes", "lots"], "--sizes lots: \"lots\" is not a size"),
        (vec!["--operations", "jump"], "--operations jump: it is one of all_reduce, "),
        (vec!["--dtype", "f8"], "--dtype f8: it is one of "),
        (vec!["--tuning", "fast"], "--tuning fast: it is one of auto, off, measure"),
        (vec!["-n", "0"], "--tasks 0: it must be at least 1"),
        (vec!["train.py"], "unexpected argument 'train.py'"),
    ] {
        bench(&cache, &words).expect(64, &[said]);
    }
    assert!(!cache.path().join("deuteron").exists());
}

#[test]
fn a_terminal_shows_how_far_it_is() {
    let _case = Case::within(60);
    let (terminal, cache) = (Terminal::new(), Directory::new());
    let cache = cache.path().display();
    terminal.keys(&format!(
        "XDG_CACHE_HOME={cache} {DEUTERON} bench -n 2 --sizes 8,1MiB --operations all_reduce\n"
    ));
    // Lines that come together are drawn as the last of them, so only the last is certain.
    terminal.wait_for("deuteron: all_reduce 1 MiB (4 of 4)", 1);
    terminal.wait_for("2 tasks on 1 host succeeded", 1);
    let text = terminal.text();
    assert!(text.contains("\r\u{1b}[K2 ranks on 1 host"), "the progress line is gone: {text:?}");
}
