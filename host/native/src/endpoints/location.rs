//! Checks the path of a device plugin's socket.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nodedock_base::own_sockets;
use nodedock_model::{Problem, ProblemCode, limit};

/// Bytes of an endpoint in an error to the plugin.
const SHOWN_CHARS_MAX: usize = 128;

/// Location of a plugin's socket, by the way in which it registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// Plugin registered by a call on `kubelet.sock`: a file in the directory of device plugins.
    Beside { directory: PathBuf, name: String },
    /// Plugin registered by a registration socket, whose removal ends the registration: an absolute path, checked at its registration.
    At {
        endpoint: PathBuf,
        registration: String,
    },
}

impl Location {
    /// Returns the endpoint of a request to register: a file in `directory`, other than the registration socket itself.
    pub fn beside(directory: &Path, endpoint: &str, reserved: &str) -> Result<Self, Problem> {
        let is_name = !matches!(endpoint, "" | "." | "..") && !endpoint.contains(['/', '\0']);
        if !is_name {
            return Err(invalid_name(
                endpoint,
                "the name of a file in the directory of device plugins is wanted, without '/'",
            ));
        }
        if endpoint == reserved {
            return Err(invalid_name(
                endpoint,
                "this is the socket on which plugins register",
            ));
        }
        if directory.as_os_str().len() + 1 + endpoint.len() > limit::SOCKET_PATH_BYTES_MAX {
            return Err(invalid_name(
                endpoint,
                "with its directory it is longer than the 107 bytes of a socket's path",
            ));
        }
        Ok(Self::Beside {
            directory: directory.to_owned(),
            name: endpoint.to_owned(),
        })
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Self::Beside { directory, name } => directory.join(name),
            Self::At { endpoint, .. } => endpoint.clone(),
        }
    }

    /// Returns the current socket, with its links resolved.
    pub(super) async fn resolve(&self) -> Result<PathBuf, Problem> {
        let path = self.path();
        let shown = path.display();
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Problem::not_found(
                ProblemCode::EndpointMissing,
                format!("the socket {shown} does not exist"),
            ),
            _ => Problem::unavailable(
                ProblemCode::EndpointUnreadable,
                format!("check {shown}: {error}"),
            ),
        };
        let invalid =
            |why: &str| Problem::invalid(ProblemCode::EndpointNotValid, format!("{shown} {why}"));
        let resolved = tokio::fs::canonicalize(&path).await.map_err(failed)?;
        if let Self::Beside { directory, .. } = self {
            let directory = tokio::fs::canonicalize(directory).await.map_err(failed)?;
            if resolved.parent() != Some(&directory) {
                return Err(invalid("leads out of its directory"));
            }
        }
        let found = tokio::fs::symlink_metadata(&resolved)
            .await
            .map_err(failed)?;
        if !found.file_type().is_socket() {
            return Err(invalid("is not a socket"));
        }
        if own_sockets::contains(found.dev(), found.ino()) {
            return Err(invalid("is a socket of this daemon"));
        }
        Ok(resolved)
    }
}

fn invalid_name(endpoint: &str, why: &str) -> Problem {
    let shown: String = endpoint.chars().take(SHOWN_CHARS_MAX).collect();
    Problem::invalid(
        ProblemCode::EndpointNotValid,
        format!("endpoint {shown:?}: {why}"),
    )
}
