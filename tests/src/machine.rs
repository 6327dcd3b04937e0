//! Permissions of this machine, and a one-line report of the parts that a test skips for lack of them.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tells what is not tested here, and in which test; `cargo xtask test` reads it too.
pub fn skip(what: &str, why: &str) {
    // The harness names the thread of a test after it.
    let thread = std::thread::current();
    tell(&format!(
        "skipped in {}: {what}: {}",
        thread.name().unwrap_or("a thread"),
        why.replace('\n', " ")
    ));
}

/// Reports the checks as skipped if what they need is not on this machine.
pub fn or_skip<T>(what: &str, found: Result<T, String>) -> Option<T> {
    found.map_err(|why| skip(what, &why)).ok()
}

/// Writes a line past the harness, which shows the output of failed tests only.
pub fn tell(line: &str) {
    // In one piece, between the lines of others. A closed output is no reason to fail.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Listens on a loopback address that no other test uses, so that its port remains free once it is closed.
pub fn own_listener() -> TcpListener {
    let [.., high, low] = std::process::id().to_be_bytes();
    TcpListener::bind((Ipv4Addr::new(127, 77, high, low), 0)).expect("a loopback address")
}

/// A small file system in memory; taken away when dropped.
#[derive(Debug)]
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts it on a directory. The error says in one line why it cannot be.
    pub fn mount(dir: &Path, options: &str) -> Result<Self, String> {
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", options, "nodedock-test"])
            .arg(dir);
        run(&mut mount)?;
        Ok(Self(dir.to_owned()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// A small ext4 on a loop device, which can be frozen and made read-only; taken away when dropped.
#[derive(Debug)]
pub struct Ext4 {
    dir: PathBuf,
    /// Removed when dropped; the loop device keeps the file while it is mounted.
    _image: tempfile::TempPath,
}

impl Ext4 {
    /// Mounts it on a directory. The error says in one line why it cannot be.
    pub fn mount(dir: &Path, bytes: u64) -> Result<Self, String> {
        let image = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        image
            .as_file()
            .set_len(bytes)
            .map_err(|error| error.to_string())?;
        let mkfs = program("mkfs.ext4").ok_or("there is no mkfs.ext4")?;
        run(Command::new(mkfs).args(["-q", "-F"]).arg(image.path()))?;
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", "loop"])
            .arg(image.path())
            .arg(dir))?;
        Ok(Self {
            dir: dir.to_owned(),
            _image: image.into_temp_path(),
        })
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        unmount(&self.dir);
    }
}

/// Changes how a directory is mounted: `ro` or `rw`.
pub fn remount(dir: &Path, how: &str) -> Result<(), String> {
    run(Command::new("mount")
        .arg("-o")
        .arg(format!("remount,{how}"))
        .arg(dir))
}

/// Makes a file refuse writes, also of those who have it open.
pub fn set_immutable(file: &Path, immutable: bool) -> Result<(), String> {
    let chattr = program("chattr").ok_or("there is no chattr")?;
    run(Command::new(chattr)
        .arg(if immutable { "+i" } else { "-i" })
        .arg(file))
}

/// A file system whose writes wait; they resume when this is dropped.
#[derive(Debug)]
pub struct Frozen(PathBuf);

impl Frozen {
    /// Freezes what is mounted on a directory. The error says in one line why it cannot be.
    pub fn freeze(dir: &Path) -> Result<Self, String> {
        run(
            Command::new(program("fsfreeze").ok_or("there is no fsfreeze")?)
                .arg("--freeze")
                .arg(dir),
        )?;
        Ok(Self(dir.to_owned()))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let fsfreeze = program("fsfreeze").unwrap_or_else(|| "fsfreeze".into());
        if let Err(why) = run(Command::new(fsfreeze).arg("--unfreeze").arg(&self.0)) {
            skip(&format!("unfreezing {}", self.0.display()), &why);
        }
    }
}

fn unmount(dir: &Path) {
    // Lazily: a daemon that is about to end may still have files open.
    if let Err(why) = run(Command::new("umount").arg("--lazy").arg(dir)) {
        skip(&format!("unmounting {}", dir.display()), &why);
    }
}

/// Runs a command; the error says in one line what became of it.
pub fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{program}: {}",
        said.lines().next().unwrap_or("it failed")
    ))
}

/// Writes a script that can be executed. A process of its own writes it: a process that another test forks at that moment would hold
/// a file of this process open for writing, and the system executes no such file.
pub fn write_script(path: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"])
        .arg(path)
        .stdin(Stdio::piped());
    let mut shell = shell.spawn().expect("there is a shell");
    let mut input = shell.stdin.take().expect("it is piped");
    input
        .write_all(text.as_bytes())
        .expect("the shell reads its input");
    drop(input);
    let ended = shell.wait().expect("wait for the shell");
    assert!(ended.success(), "write {}: {ended}", path.display());
}

/// A program of the system, also where PATH has not its directory.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs =
        std::env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/bin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The SHA-256 of bytes, in hex, from the system's own tool: an independent witness.
pub fn sha256(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("write a temporary file");
    let output = Command::new("sha256sum")
        .arg(file.path())
        .output()
        .expect("sha256sum is in coreutils");
    String::from_utf8_lossy(&output.stdout)
        .chars()
        .take_while(char::is_ascii_hexdigit)
        .collect()
}
