//! Where the program and the built drivers are.

use std::path::{Path, PathBuf};

/// The `nodedock` program: `NODEDOCK_BIN`, else the one that was built beside this test.
pub fn nodedock() -> PathBuf {
    let program = std::env::var_os("NODEDOCK_BIN").map_or_else(|| target().join("nodedock"), PathBuf::from);
    let path = program.display();
    assert!(program.is_file(), "there is no program {path}: build it with `cargo build -p nodedock`");
    program
}

/// The folder of built drivers: `NODEDOCK_DRIVERS_DIR`, else `target/drivers`.
pub fn drivers() -> PathBuf {
    let beside = || target().parent().unwrap_or(Path::new(".")).join("drivers");
    let folder = std::env::var_os("NODEDOCK_DRIVERS_DIR").map_or_else(beside, PathBuf::from);
    let path = folder.display();
    assert!(folder.is_dir(), "there is no folder {path}: build the drivers with `cargo xtask drivers`");
    folder
}

/// The example drivers' sources, with their grants and configs.
pub fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../example-drivers")
}

/// The folder of the profile that this was built with, such as `target/debug`.
fn target() -> PathBuf {
    let this = std::env::current_exe().expect("the system knows the path of a running program");
    let folder = this.parent().unwrap_or(Path::new("."));
    let is_deps = folder.file_name().is_some_and(|name| name == "deps");
    if is_deps { folder.parent().unwrap_or(folder).to_owned() } else { folder.to_owned() }
}
