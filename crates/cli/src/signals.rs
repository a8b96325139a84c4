//! What Ctrl-C, Ctrl-Z and their like do: a thread waits for signals, and nothing runs in a handler.

use deuteron_gang::supervisor::Control;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP},
    iterator::Signals,
    low_level,
};
use std::{io, thread, time::Duration};

/// How long Ctrl-Z waits for the tasks to have stopped before it stops this command all the same.
const PAUSE_LIMIT: Duration = Duration::from_secs(2);

/// Calls `end` at the first signal that asks the job to end, ends this process at the second, and stops and continues
/// the tasks together with this command.
pub(crate) fn watch(control: Control, end: impl Fn(i32) + Send + 'static) -> io::Result<()> {
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP, SIGTSTP];
    // What was ignored from the start stays so: that is what nohup, and a shell's background jobs, rely on.
    let wanted = wanted.iter().filter(|signal| ignored & (1 << (**signal - 1)) == 0);
    let mut signals = Signals::new(wanted)?;
    thread::Builder::new().name("deuteron-signals".into()).spawn(move || {
        let mut ended = false;
        for signal in signals.forever() {
            if signal == SIGTSTP {
                control.pause(PAUSE_LIMIT);
                // Returns when somebody continues this process.
                let _ = low_level::emulate_default_handler(signal);
                control.resume();
            } else if ended {
                // Agents see that this process is gone, and end their tasks.
                let _ = low_level::emulate_default_handler(signal);
            } else {
                ended = true;
                end(signal);
            }
        }
    })?;
    Ok(())
}

/// Its name, as users know it.
pub(crate) fn name(signal: i32) -> &'static str {
    low_level::signal_name(signal).unwrap_or("a signal")
}

/// The signals that this process was started to ignore, as the kernel shows them.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_known() {
        // Rust's runtime ignores SIGPIPE, and nothing else.
        let pipe = 1 << (signal_hook::consts::SIGPIPE - 1);
        assert_eq!(ignored() & pipe, pipe);
        assert_eq!(name(SIGINT), "SIGINT");
    }
}
