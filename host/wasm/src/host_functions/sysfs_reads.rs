//! Reads below `/sys`: what can be read, and what was found.

use std::sync::Arc;

use nodedock_core::sysfs::{Reader, SysfsRoot};
use nodedock_model::Problem;

/// A kind of read below `/sys`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Read,
    Dir,
    Link,
    Glob,
}

impl Kind {
    pub(super) fn read(
        self,
        sysfs: &SysfsRoot,
        path: &str,
        reader: Reader,
    ) -> Result<SysfsEntry, Problem> {
        let (content, names) = match self {
            Self::Read => (sysfs.read_for(path, reader)?, Vec::new()),
            Self::Dir => (Vec::new(), sysfs.read_dir_for(path, reader)?),
            Self::Link => (Vec::new(), vec![sysfs.read_link(path)?]),
            Self::Glob => (Vec::new(), sysfs.glob(path)?),
        };
        Ok(SysfsEntry {
            content: content.into(),
            names: names.into(),
        })
    }

    /// Names and links are the kernel's own tables. The content of an attribute comes from the driver of its device, which may hang; a
    /// glob may read many directories.
    pub(super) fn may_hang(self) -> bool {
        matches!(self, Self::Read | Self::Glob)
    }
}

/// The content of a file, or names: of a directory's entries, or one that is a link's target. The other field is empty.
#[derive(Clone)]
pub(crate) struct SysfsEntry {
    pub(super) content: Arc<[u8]>,
    pub(super) names: Arc<[String]>,
}

impl SysfsEntry {
    pub(super) fn size(&self) -> usize {
        self.content.len()
            + self
                .names
                .iter()
                .map(|name| name.len() + size_of::<String>())
                .sum::<usize>()
    }
}
