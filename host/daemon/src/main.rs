//! The node program.

fn main() -> std::process::ExitCode {
    nodedockd::program::main()
}
