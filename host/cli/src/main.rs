//! The `nodedock` command.

fn main() -> std::process::ExitCode {
    nodedock::main()
}
