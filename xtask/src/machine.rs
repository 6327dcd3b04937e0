//! What this machine has of other people's software, and in one line why something cannot be used.

use std::env;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(crate) enum Finding {
    Present,
    Missing(String),
}

/// All that a container with a device needs.
pub(crate) struct Podman {
    pub(crate) program: PathBuf,
    pub(crate) runtime: PathBuf,
    pub(crate) busybox: PathBuf,
}

/// Podman with a runtime and a static busybox, as root: a device node needs real privileges.
pub(crate) fn podman() -> Result<Podman, String> {
    let program = find("podman").ok_or("podman is not installed")?;
    let runtime = ["runc", "crun"].into_iter().find_map(find).ok_or("neither runc nor crun is installed")?;
    let busybox = static_busybox().ok_or("no statically linked busybox (package busybox-static)")?;
    if !rustix::process::geteuid().is_root() {
        return Err("podman needs root to hand a device to a container".into());
    }
    Ok(Podman { program, runtime, busybox })
}

/// In the PATH, or where Go's own installer puts it.
pub(crate) fn go() -> Finding {
    if find("go").is_some() || is_program(Path::new("/usr/local/go/bin/go")) {
        Finding::Present
    } else {
        Finding::Missing("Go is not installed".into())
    }
}

pub(crate) fn python_grpc() -> Finding {
    let Some(python) = find("python3") else {
        return Finding::Missing("Python is not installed".into());
    };
    let mut command = Command::new(python);
    command.args(["-c", "import grpc"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => Finding::Present,
        _ => Finding::Missing("Python has no grpcio (python3 -m pip install grpcio)".into()),
    }
}

/// Looks where a shell would, and in the folders of system programs, which not everybody's PATH has.
fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn static_busybox() -> Option<PathBuf> {
    let candidates = [Some("/bin/busybox".into()), find("busybox")];
    candidates.into_iter().flatten().find(|file| is_program(file) && is_static(file))
}

/// A dynamic program names its loader right behind the ELF headers.
fn is_static(program: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(program).and_then(|file| file.take(4096).read_to_end(&mut head));
    read.is_ok() && head.starts_with(b"\x7fELF") && !names_loader(&head)
}

fn names_loader(head: &[u8]) -> bool {
    head.windows(4).any(|bytes| bytes == b"/ld-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_where_a_shell_finds_them() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program").is_none());
    }

    #[test]
    fn a_dynamic_program_is_not_static() {
        assert!(names_loader(b"\x7fELF....\0/lib64/ld-linux-x86-64.so.2\0"));
        assert!(!names_loader(b"\x7fELF....\0GNU\0"));
        assert!(!is_static(Path::new("/etc/passwd")));
        assert!(!is_static(Path::new("/no/such/file")));
    }
}
