//! Access rights to the files that container runtimes read.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

/// Mode and group of CDI files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileAccess {
    mode: u32,
    /// None: the group that a new file gets.
    group: Option<u32>,
}

/// Every user may read them: a rootless runtime reads them as its user.
impl Default for FileAccess {
    fn default() -> Self {
        Self {
            mode: 0o644,
            group: None,
        }
    }
}

impl FileAccess {
    const OWNER: u32 = 0o600;
    const READABLE: u32 = 0o644;

    /// None: the owner could not read and write the files, or others could write or execute them.
    pub fn new(mode: u32, group: Option<u32>) -> Option<Self> {
        (mode & Self::OWNER == Self::OWNER && mode & !Self::READABLE == 0)
            .then_some(Self { mode, group })
    }

    /// Returns the mode of a new file. It has the group of the process, so that another group's file is the owner's alone at first.
    pub(crate) fn initial_mode(self) -> u32 {
        self.group.map_or(self.mode, |_| Self::OWNER)
    }

    /// Gives a file the mode and the group.
    ///
    /// # Errors
    ///
    /// The kernel refuses it, or the file has no metadata.
    pub fn apply(self, file: &File) -> io::Result<()> {
        self.set(file, self.mode)
    }

    /// Lets those enter a directory that may read the files.
    pub(crate) fn apply_to_directory(self, directory: &File) -> io::Result<()> {
        let others = self.mode & !Self::OWNER;
        self.set(directory, 0o700 | others | others >> 2)
    }

    /// The group first: a change of it may clear bits of the mode, and the old group never reads.
    fn set(self, file: &File, mode: u32) -> io::Result<()> {
        let found = file.metadata()?;
        if let Some(group) = self.group.filter(|group| *group != found.gid()) {
            file.set_permissions(Permissions::from_mode(mode & 0o700))?;
            std::os::unix::fs::fchown(file, None, Some(group))?;
        } else if found.mode() & 0o7777 == mode {
            return Ok(());
        }
        file.set_permissions(Permissions::from_mode(mode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_owner_writable_modes_are_valid() {
        for good in [0o600, 0o640, 0o604, 0o644] {
            assert!(FileAccess::new(good, None).is_some(), "{good:o}");
        }
        for bad in [
            0,
            0o400,
            0o044,
            0o660,
            0o646,
            0o755,
            0o4644,
            0o1644,
            u32::MAX,
        ] {
            assert!(FileAccess::new(bad, None).is_none(), "{bad:o}");
        }
    }
}
