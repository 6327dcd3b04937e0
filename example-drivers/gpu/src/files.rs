//! Libraries and programs of the node that containers get: what the config of the pools names.

use std::collections::BTreeMap;

use nodedock_sdk::{ContainerEdits, FileKind, Host, Mount, Problem, ProblemKind};

use crate::config::{PoolConfig, is_glob};

/// Mounts of a claim, by the contract.
const MOUNTS_MAX: usize = 64;

/// Files that the driver looks at, and mounts. The config names some of them.
pub(crate) const LIBRARIES: [&str; 7] = [
    "/usr/lib/*/lib*nvidia*.so*",
    "/usr/lib/*/libcuda*.so*",
    "/usr/lib/*/libnvcuvid.so*",
    "/usr/lib64/lib*nvidia*.so*",
    "/usr/lib64/libcuda*.so*",
    "/usr/lib64/libnvcuvid.so*",
    "/opt/nvidia/**",
];

/// Programs that the driver mounts. They are beyond the host's ceiling for files that a driver looks at, and a grant names each.
pub(crate) const BINARIES: [&str; 5] = [
    "/usr/bin/nvidia-cuda-mps-control",
    "/usr/bin/nvidia-cuda-mps-server",
    "/usr/bin/nvidia-debugdump",
    "/usr/bin/nvidia-persistenced",
    "/usr/bin/nvidia-smi",
];

/// The files of a claim, by path in the container, with the path on the node.
#[derive(Default)]
pub(crate) struct Files {
    mounts: BTreeMap<String, String>,
}

impl Files {
    /// Adds the files of a pool.
    pub(crate) fn add(&mut self, host: &Host, pool: &PoolConfig) -> Result<(), Problem> {
        for pattern in &pool.libraries {
            let paths = paths(host, pattern)?;
            if paths.is_empty() {
                return Err(missing(pattern, "no file matches"));
            }
            for path in paths {
                self.add_library(host, path)?;
            }
        }
        // The host checks them with the edits: a driver cannot.
        self.mounts.extend(
            pool.binaries
                .iter()
                .map(|path| (path.clone(), path.clone())),
        );
        Ok(())
    }

    /// A library is mounted under the name that programs look for, from the file that the name leads to now.
    fn add_library(&mut self, host: &Host, path: String) -> Result<(), Problem> {
        let file = match host.host_files().stat(&path) {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                return Err(missing(&path, "the file is gone"));
            }
            file => file?,
        };
        if file.kind == FileKind::Regular {
            self.mounts.insert(path, file.real_path);
        }
        Ok(())
    }

    /// Returns the mounts for every container of the claim.
    pub(crate) fn into_edits(self) -> Result<ContainerEdits, Problem> {
        if self.mounts.len() > MOUNTS_MAX {
            let message = format!(
                "the config names {} libraries and binaries, at most {MOUNTS_MAX}",
                self.mounts.len()
            );
            return Err(Problem::invalid("too-many-files", message));
        }
        Ok(self
            .mounts
            .into_iter()
            .fold(ContainerEdits::new(), |edits, (container, host)| {
                edits.mount(Mount::read_only(host, container))
            }))
    }
}

fn paths(host: &Host, pattern: &str) -> Result<Vec<String>, Problem> {
    if !is_glob(pattern) {
        return Ok(vec![pattern.to_owned()]);
    }
    Ok(host
        .host_files()
        .glob(pattern)?
        .into_iter()
        .map(|file| file.path)
        .collect())
}

fn missing(path: &str, reason: &str) -> Problem {
    Problem::unavailable(
        "no-such-library",
        format!("library {path} of the config: {reason}"),
    )
}
