//! The `deuteron` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    deuteron_cli::main(std::env::args_os()).into()
}
