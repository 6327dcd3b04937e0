//! Checks the path of a device plugin's socket.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nodedock_model::{Problem, limit};

/// Bytes of an endpoint in an error to the plugin.
const SHOWN_CHARS_MAX: usize = 128;

/// Location of a plugin's socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A file in the directory of device plugins.
    Beside { directory: PathBuf, name: String },
    /// An absolute path, checked at its registration.
    At(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum PlaceError {
    #[error("the socket {} does not exist", .0.display())]
    Missing(PathBuf),
    #[error("{} is not a socket", .0.display())]
    NotASocket(PathBuf),
    #[error("{} leads out of its directory", .0.display())]
    Outside(PathBuf),
    #[error("check {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl From<PlaceError> for Problem {
    fn from(error: PlaceError) -> Self {
        let message = error.to_string();
        match error {
            PlaceError::Missing(_) => Self::not_found(MISSING, message),
            PlaceError::NotASocket(_) | PlaceError::Outside(_) => {
                Self::invalid("endpoint-not-valid", message)
            }
            PlaceError::Io { .. } => Self::unavailable("endpoint-unreadable", message),
        }
    }
}

/// The code of a missing socket.
pub(super) const MISSING: &str = "endpoint-missing";

impl Location {
    /// Returns the endpoint of a request to register: a file in `directory`, other than the registration socket itself.
    pub fn beside(directory: &Path, endpoint: &str, reserved: &str) -> Result<Self, Problem> {
        let shown = || {
            let cut: String = endpoint.chars().take(SHOWN_CHARS_MAX).collect();
            format!("{cut:?}")
        };
        let invalid =
            |why: &str| Problem::invalid("endpoint-not-valid", format!("endpoint {}: {why}", shown()));
        let is_name = !matches!(endpoint, "" | "." | "..") && !endpoint.contains(['/', '\0']);
        if !is_name {
            return Err(invalid(
                "the name of a file in the directory of device plugins is wanted, without '/'",
            ));
        }
        if endpoint == reserved {
            return Err(invalid("this is the socket on which plugins register"));
        }
        if directory.as_os_str().len() + 1 + endpoint.len() > limit::SOCKET_PATH_BYTES_MAX {
            return Err(invalid("with its directory it is longer than the 107 bytes of a socket's path"));
        }
        Ok(Self::Beside { directory: directory.to_owned(), name: endpoint.to_owned() })
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Self::Beside { directory, name } => directory.join(name),
            Self::At(path) => path.clone(),
        }
    }

    /// Returns the current socket, with its links resolved.
    pub(super) async fn resolve(&self) -> Result<PathBuf, PlaceError> {
        let path = self.path();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => PlaceError::Missing(path.clone()),
            _ => PlaceError::Io { path: path.clone(), source },
        };
        let resolved = tokio::fs::canonicalize(&path).await.map_err(failed)?;
        if let Self::Beside { directory, .. } = self {
            let directory = tokio::fs::canonicalize(directory).await.map_err(failed)?;
            if resolved.parent() != Some(&directory) {
                return Err(PlaceError::Outside(path));
            }
        }
        let found = tokio::fs::symlink_metadata(&resolved).await.map_err(failed)?;
        if found.file_type().is_socket() { Ok(resolved) } else { Err(PlaceError::NotASocket(path)) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn an_endpoint_is_the_name_of_a_file() {
        let beside = |endpoint: &str| Location::beside(Path::new("/dp"), endpoint, "kubelet.sock");
        assert_eq!(beside("gpu.sock").unwrap().path(), Path::new("/dp/gpu.sock"));
        for bad in ["", ".", "..", "../gpu.sock", "/run/gpu.sock", "a/gpu.sock", "a\0b", "kubelet.sock"] {
            let problem = beside(bad).unwrap_err();
            assert!(problem.message.starts_with(&format!("endpoint {bad:?}: ")), "{problem}");
        }
        let long = beside(&"x".repeat(5000)).unwrap_err();
        assert!(long.message.contains("107 bytes") && long.message.len() < 1024, "{long}");
    }

    #[tokio::test]
    async fn what_is_no_socket_or_lies_elsewhere_is_not_dialled() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let socket = |name: &str| UnixListener::bind(dir.path().join(name)).unwrap();
        let (_one, _far) =
            (socket("one.sock"), UnixListener::bind(elsewhere.path().join("far.sock")).unwrap());
        std::fs::write(dir.path().join("file.sock"), "").unwrap();
        symlink("one.sock", dir.path().join("link.sock")).unwrap();
        symlink(elsewhere.path().join("far.sock"), dir.path().join("out.sock")).unwrap();
        symlink("nothing", dir.path().join("dangling.sock")).unwrap();
        let resolve = async |name: &str| {
            let location = Location::beside(dir.path(), name, "kubelet.sock").unwrap();
            location.resolve().await.map_err(|error| Problem::from(error).code)
        };
        let one = dir.path().canonicalize().unwrap().join("one.sock");
        assert_eq!(resolve("one.sock").await, Ok(one.clone()));
        assert_eq!(resolve("link.sock").await, Ok(one));
        assert_eq!(resolve("file.sock").await, Err("endpoint-not-valid".to_owned()));
        assert_eq!(resolve("out.sock").await, Err("endpoint-not-valid".to_owned()));
        assert_eq!(resolve("none.sock").await, Err(MISSING.to_owned()));
        assert_eq!(resolve("dangling.sock").await, Err(MISSING.to_owned()));
    }
}
