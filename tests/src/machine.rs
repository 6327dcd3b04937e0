//! What this machine permits, and in one line what a test leaves out because it does not.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tells what is not tested here.
pub fn skip(what: &str, why: &str) {
    tell(&format!("skipped: {what}: {why}"));
}

/// Writes a line past the harness, which shows the output of failed tests only.
pub fn tell(line: &str) {
    // Nobody to tell is no reason to fail.
    let _ = writeln!(std::io::stderr(), "{line}");
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A small file system in memory; taken away when dropped.
#[derive(Debug)]
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts it on a folder. The error says in one line why it cannot be.
    pub fn mount(folder: &Path, options: &str) -> Result<Self, String> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "nodedock-test"]).arg(folder);
        run(&mut mount)?;
        Ok(Self(folder.to_owned()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a daemon that is about to end may still have files open.
        if let Err(why) = run(Command::new("umount").arg("--lazy").arg(&self.0)) {
            skip(&format!("unmounting {}", self.0.display()), &why);
        }
    }
}

/// Runs a command; the error says in one line what became of it.
pub fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program}: {}", said.lines().next().unwrap_or("it failed")))
}

/// A program of the system, also where PATH has not its folder.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/bin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The SHA-256 of bytes, in hex, from the system's own tool: an independent witness.
pub fn sha256(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("write a temporary file");
    let output = Command::new("sha256sum").arg(file.path()).output().expect("sha256sum is in coreutils");
    String::from_utf8_lossy(&output.stdout).chars().take_while(char::is_ascii_hexdigit).collect()
}
