//! The table that `deuteron bench` prints.

use super::sized;
use crate::values::counted;
use serde_json::Value;
use std::fmt::Write as _;

const TITLES: [&str; 8] =
    ["operation", "size", "memory", "median", "range", "bus", "algorithm", "why"];

/// Everything that was measured, in words.
pub(super) fn text(report: &Value) -> String {
    let mut text = String::new();
    let hosts: Vec<&str> = list(&report["hosts"]).iter().filter_map(Value::as_str).collect();
    let ranks = report["ranks"].as_u64().unwrap_or_default() as usize;
    let way = match (ranks, report["shares_memory"].as_bool()) {
        (1, _) => "alone",
        (_, Some(true)) => "shared memory",
        _ => "links",
    };
    let _ = writeln!(
        text,
        "{} on {} ({}), {} a host, {way}, {}",
        counted(ranks, "rank"),
        counted(hosts.len(), "host"),
        hosts.join(", "),
        counted(report["cores"].as_u64().unwrap_or_default() as usize, "core"),
        report["dtype"].as_str().unwrap_or_default(),
    );
    tuning(&mut text, &report["tuning"]);
    text.push('\n');
    let mut rows = vec![TITLES.map(str::to_owned)];
    rows.extend(list(&report["rows"]).iter().map(row));
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..TITLES.len()).map(width).collect();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            // Numbers stand right, words left.
            let _ = match column {
                1 | 3..=5 => write!(line, "{cell:>width$}  ", width = widths[column]),
                _ => write!(line, "{cell:<width$}  ", width = widths[column]),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn tuning(text: &mut String, tuning: &Value) {
    if tuning.is_null() {
        text.push_str("tuning is off: the thresholds are the defaults\n");
        return;
    }
    let speed = |name: &str| tuning[name].as_f64().map(|speed| format!("{:.2} GB/s", speed / 1e9));
    let time = |name: &str| tuning[name].as_f64().map(shown_time);
    let constants = [
        ("exchange", time("exchange_seconds")),
        ("copy", speed("copy_bytes_per_second")),
        ("reduce", speed("reduce_bytes_per_second")),
        ("latency", time("latency_seconds")),
        ("bandwidth", speed("bandwidth_bytes_per_second")),
    ];
    let constants: Vec<String> = constants
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name} {}", value?)))
        .collect();
    let thresholds = list(&tuning["thresholds"]);
    if constants.is_empty() && thresholds.is_empty() {
        return;
    }
    let origin = match (tuning["measured_now"].as_bool(), tuning["file"].as_str()) {
        (Some(false), Some(file)) => format!("as measured before, kept in {file}"),
        (Some(true), Some(file)) => format!("measured now, kept in {file}"),
        _ => "measured now".to_owned(),
    };
    let _ = writeln!(text, "{} ({origin})", constants.join(", "));
    for threshold in thresholds {
        let _ = writeln!(
            text,
            "  {:<9} {:>8}  {}",
            threshold["name"].as_str().unwrap_or_default(),
            sized(threshold["bytes"].as_u64().unwrap_or_default()),
            threshold["reason"].as_str().unwrap_or_default(),
        );
    }
}

fn row(row: &Value) -> [String; 8] {
    let word = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    let seconds = |name: &str| row[name].as_f64().unwrap_or_default();
    let bytes = row["bytes"].as_u64().unwrap_or_default();
    let memory = match (bytes, row["registered"].as_bool()) {
        (0, _) => "",
        (_, Some(true)) => "registered",
        _ => "plain",
    };
    [
        word("operation"),
        if bytes == 0 { String::new() } else { sized(bytes) },
        memory.to_owned(),
        shown_time(seconds("median_seconds")),
        format!(
            "{} – {}",
            shown_time(seconds("least_seconds")),
            shown_time(seconds("most_seconds"))
        ),
        row["bus_bytes_per_second"].as_f64().map_or(String::new(), shown_speed),
        word("algorithm"),
        word("reason"),
    ]
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn shown_time(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.2} s"),
        seconds if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{:.2} µs", seconds * 1e6),
    }
}

fn shown_speed(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1e9 => format!("{:.2} GB/s", bytes / 1e9),
        bytes => format!("{:.2} MB/s", bytes / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_becomes_a_table() {
        let report = json!({
            "ranks": 2, "hosts": ["a"], "cores": 2, "shares_memory": true, "dtype": "f32",
            "tuning": {
                "measured_now": false, "file": "~/.cache/deuteron/tuning-1.txt",
                "exchange_seconds": 4.12e-7, "copy_bytes_per_second": 8.5e9,
                "reduce_bytes_per_second": null, "latency_seconds": null,
                "bandwidth_bytes_per_second": null,
                "thresholds": [{ "name": "one_shot", "bytes": 4096, "reason": "it was measured" }],
            },
            "rows": [
                {
                    "operation": "all_reduce", "bytes": 1048576, "registered": true,
                    "median_seconds": 1.5e-4, "least_seconds": 1.25e-4, "most_seconds": 2.5e-3,
                    "bus_bytes_per_second": 6.99e9, "algorithm": "InPlace", "reason": "it is large",
                },
                {
                    "operation": "barrier", "bytes": 0, "registered": false,
                    "median_seconds": 1.0, "least_seconds": 4e-7, "most_seconds": 2.0,
                    "bus_bytes_per_second": null, "algorithm": "Inline", "reason": "it is small",
                },
            ],
        });
        assert_eq!(
            text(&report),
            "2 ranks on 1 host (a), 2 cores a host, shared memory, f32\n\
             exchange 0.41 µs, copy 8.50 GB/s (as measured before, kept in ~/.cache/deuteron/tuning-1.txt)\n\
             \x20 one_shot     4 KiB  it was measured\n\
             \n\
             operation    size  memory         median                range        bus  algorithm  why\n\
             all_reduce  1 MiB  registered  150.00 µs  125.00 µs – 2.50 ms  6.99 GB/s  InPlace    it is large\n\
             barrier                           1.00 s     0.40 µs – 2.00 s             Inline     it is small\n"
        );
    }

    #[test]
    fn without_tuning_it_says_so() {
        let report = json!({ "ranks": 1, "hosts": ["a"], "cores": 1, "shares_memory": true, "dtype": "i64", "tuning": null, "rows": [] });
        let text = text(&report);
        assert!(text.starts_with("1 rank on 1 host (a), 1 core a host, alone, i64\ntuning is off"));
    }
}
