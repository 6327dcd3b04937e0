//! Writing one file below `/sys`: it is read first, and written if it is still the same file. Blocking functions, not for async threads.

use std::io::Write;
use std::sync::LazyLock;

use rustix::fs::{FileType, OFlags, ResolveFlags};

use crate::sysfs::{SysfsRoot, VALUE_BYTES_MAX, denied, io_problem, is_absent, patterns, stat};
use nodedock_model::grant::pattern::PatternSet;
use nodedock_model::{Problem, ProblemCode};

/// Never written, in addition to what is never read and to everything that is no attribute of a device: CPUs and memory, block devices,
/// power, and files that fake events or load firmware.
static WRITE_DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "devices/system/**",
        "devices/{cpu,cpu_*,css[0-9]*,rbd}/**",
        "devices/platform/{dell_rbu,dcdbas}/**",
        "**/{firmware,nvme,nvme-fabrics,nvme-subsystem,scsi_host,scsi_disk,scsi_device,watchdog}/**",
        "**/target[0-9]*/**",
        "**/{delete,eject,online,authorized,driver_override,reset_controller,delete_controller,rescan_controller}",
        "**/{reset_subordinate,legacy_io,legacy_mem,console}",
        "devices/virtual/{bdi,block,firmware,mem,misc,tty,vtconsole,workqueue}/**",
        "devices/**/block/**",
        "**/power/**",
        "**/uevent",
    ])
});

/// A file that may be written, or the binding of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attribute {
    /// Path without links.
    pub path: String,
    pub inode: u64,
    /// Value without its line ending. `None`: the kernel gives no value, or it is not text, or longer than what can be written.
    pub value: Option<String>,
}

/// The result of a write.
#[derive(Debug)]
pub struct Written {
    /// The kernel's refusal.
    pub outcome: Result<(), Problem>,
    /// Value of the file afterwards. `None` as in an [`Attribute`]; an error: it could not be read back.
    pub value: Result<Option<String>, Problem>,
}

impl SysfsRoot {
    pub fn attribute(&self, path: &str) -> Result<Attribute, Problem> {
        let (resolved, stat) = self.regular_file(path)?;
        // An attribute of a device: no parameter of a module or the kernel, and nothing of a bus or a class itself.
        let is_of_device = resolved.starts_with("devices/");
        if !is_of_device || WRITE_DENIED.matches(path) || WRITE_DENIED.matches(&resolved) {
            return Err(denied(path));
        }
        Ok(Attribute {
            value: self.value(&resolved)?,
            inode: stat.st_ino,
            path: resolved,
        })
    }

    /// Writes to the file that was read before.
    pub(super) fn write(&self, attribute: &Attribute, value: &str) -> Result<Written, Problem> {
        let path = &attribute.path;
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.open_beneath(path, flags, ResolveFlags::NO_SYMLINKS)?;
        let found = stat(path, &file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        if !is_file || found.st_ino != attribute.inode {
            return Err(replaced(path));
        }
        // One system call: the kernel takes a value as a whole or not at all.
        let outcome = match std::fs::File::from(file).write(value.as_bytes()) {
            Ok(bytes) if bytes == value.len() => self
                .written(path, value)
                .map_err(|error| io_problem(path, &error)),
            Ok(_) => Err(Problem::unavailable(
                ProblemCode::IoError,
                format!("/sys/{path} took only a part of the value"),
            )),
            Err(error) => Err(io_problem(path, &error)),
        };
        Ok(Written {
            outcome,
            value: self.value(path),
        })
    }

    pub(super) fn value(&self, resolved: &str) -> Result<Option<String>, Problem> {
        let content = match self.content(resolved, resolved) {
            // A file that is only written.
            Err(problem) if problem.code == ProblemCode::NotPermitted || is_absent(&problem) => {
                return Ok(None);
            }
            content => content?,
        };
        let text = std::str::from_utf8(&content)
            .ok()
            .filter(|text| text.len() <= VALUE_BYTES_MAX);
        Ok(text.map(|text| text.trim_end().to_owned()))
    }
}

pub fn replaced(path: &str) -> Problem {
    Problem::conflict(
        ProblemCode::PathReplaced,
        format!("/sys/{path} is another device's than before"),
    )
}
