//! Paths of the programs and the built drivers.

use std::path::{Path, PathBuf};

/// The `nodedock` program: `NODEDOCK_BIN`, else the one that was built beside this test.
pub fn nodedock() -> PathBuf {
    built(std::env::var_os("NODEDOCK_BIN").map_or_else(|| target().join("nodedock"), PathBuf::from))
}

/// The node program, beside the `nodedock` program.
pub fn nodedockd() -> PathBuf {
    built(nodedock().with_file_name("nodedockd"))
}

fn built(program: PathBuf) -> PathBuf {
    let path = program.display();
    assert!(
        program.is_file(),
        "there is no program {path}: build it with `cargo build -p nodedock -p nodedockd`"
    );
    program
}

/// Another program of this package.
pub fn beside(name: &str) -> PathBuf {
    let program = target().join(name);
    let path = program.display();
    assert!(
        program.is_file(),
        "there is no program {path}: build it with `cargo build --workspace --bins`"
    );
    program
}

/// The directory of built drivers: `NODEDOCK_DRIVERS_DIR`, else `target/drivers`.
pub fn drivers() -> PathBuf {
    let beside = || target().parent().unwrap_or(Path::new(".")).join("drivers");
    let dir = std::env::var_os("NODEDOCK_DRIVERS_DIR").map_or_else(beside, PathBuf::from);
    let path = dir.display();
    assert!(
        dir.is_dir(),
        "there is no directory {path}: build the drivers with `cargo xtask drivers`"
    );
    dir
}

/// The directory of the target directory that cargo leaves to tests.
pub fn tmp() -> PathBuf {
    target().parent().unwrap_or(Path::new(".")).join("tmp")
}

/// The example drivers' sources, with their grants and configs.
pub fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../example-drivers")
}

/// The directory of the profile that this was built with, such as `target/debug`.
fn target() -> PathBuf {
    let this = std::env::current_exe().expect("the system knows the path of a running program");
    let dir = this.parent().unwrap_or(Path::new("."));
    let is_deps = dir.file_name().is_some_and(|name| name == "deps");
    if is_deps {
        dir.parent().unwrap_or(dir).to_owned()
    } else {
        dir.to_owned()
    }
}
