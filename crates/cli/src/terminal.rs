//! What every subcommand needs to know about the terminal.

use std::{
    env,
    io::{self, IsTerminal, Write as _},
};

/// Whether colours are wanted there: on a terminal that has them, unless `NO_COLOR` is set.
pub(crate) fn has_colour(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && wants_colour()
}

/// Whether colours are wanted on a terminal.
pub(crate) fn wants_colour() -> bool {
    let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && env::var_os("TERM").is_some_and(|term| term != "dumb")
}

/// Says on standard error what went wrong.
pub(crate) fn complain(text: &str) {
    let stderr = io::stderr();
    let line = if has_colour(&stderr) {
        format!("\x1b[1mdeuteron:\x1b[0m \x1b[1;31merror:\x1b[0m {text}\n")
    } else {
        format!("deuteron: error: {text}\n")
    };
    // There is nobody to tell that standard error is gone.
    let _ = stderr.lock().write_all(line.as_bytes());
}
