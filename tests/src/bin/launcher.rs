//! The `deuteron` command, of this build.

use std::process::ExitCode;

fn main() -> ExitCode {
    deuteron_cli::main(std::env::args_os()).into()
}
