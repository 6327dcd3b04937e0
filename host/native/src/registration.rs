//! The registration service for device plugins, as in a kubelet (device plugin API, `v1beta1.Registration`).
//!
//! Owns the directory's `kubelet.sock`. Passes valid requests of plugins to the endpoints, and responds when the plugin is connected and
//! was called for its options. Ignores the options in the request, as a kubelet does.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tonic::{Code, Request, Response, Status};
use wire::registration_server::{Registration, RegistrationServer};

use crate::endpoints::{Endpoints, Location, PluginSink};
use nodedock_base::directories;
use nodedock_base::error::chain;
use nodedock_base::grpc;
use nodedock_base::socket::{self, BindError};
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, Problem, ProblemCode, ProblemKind, limit};

/// The socket's name (device plugin API).
const SOCKET: &str = "kubelet.sock";
const VERSION: &str = "v1beta1";
/// Plugins that register belong to root or the daemon's user.
const DIRECTORY_MODE: u32 = 0o700;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("create the directory of device plugins {}", directory.display())]
    Directory {
        directory: PathBuf,
        source: io::Error,
    },
    #[error("remove the old sockets in {}", directory.display())]
    Sweep {
        directory: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// Creates the socket, and the directory if necessary. Removes every socket in the directory first, as a kubelet does: plugins that
/// lost their socket and see the new one create theirs again and register.
pub async fn listen(directory: &Path) -> Result<UnixListener, ListenError> {
    directories::make(directory, DIRECTORY_MODE).map_err(|source| ListenError::Directory {
        directory: directory.to_owned(),
        source,
    })?;
    let path = directory.join(SOCKET);
    // Before anything is removed: the plugins belong to another process.
    socket::refuse_occupied(&path).await?;
    sweep(directory).map_err(|source| ListenError::Sweep {
        directory: directory.to_owned(),
        source,
    })?;
    Ok(socket::bind(&path).await?)
}

/// Removes sockets; files and directories stay.
fn sweep(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Serves plugins on the socket of `listen` until the tasks stop.
pub async fn serve<S: PluginSink>(
    listener: UnixListener,
    directory: PathBuf,
    endpoints: Endpoints<S>,
    tasks: Tasks,
) {
    let service = RegistrationServer::new(Registrations {
        directory,
        endpoints,
    });
    let service = service.max_decoding_message_size(limit::REGISTER_BYTES_MAX);
    let server = tonic::transport::Server::builder().add_service(service);
    if let Err(error) = server
        .serve_with_incoming_shutdown(unix::incoming(listener), tasks.stopped())
        .await
    {
        tracing::error!(
            error = chain(&error),
            "the registration of device plugins ended"
        );
    }
}

struct Registrations<S: PluginSink> {
    directory: PathBuf,
    endpoints: Endpoints<S>,
}

impl<S: PluginSink> Registrations<S> {
    async fn admit(&self, request: &wire::RegisterRequest) -> Result<(), Problem> {
        let resource = resource(&request.resource_name);
        if let Ok(resource) = &resource {
            // Before any check, as a kubelet counts.
            self.endpoints.called(resource);
        }
        check_version(&request.version)?;
        let resource = resource?;
        let location = Location::beside(&self.directory, &request.endpoint, SOCKET)?;
        self.endpoints.register(&resource, location).await
    }
}

#[tonic::async_trait]
impl<S: PluginSink> Registration for Registrations<S> {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Result<Response<wire::Empty>, Status> {
        let request = request.into_inner();
        match self.admit(&request).await {
            Ok(()) => Ok(Response::new(wire::Empty {})),
            Err(problem) => {
                let (resource, endpoint) =
                    (shown(&request.resource_name), shown(&request.endpoint));
                let code = &problem.code;
                tracing::warn!(resource, endpoint, code, %problem, "device plugin not registered");
                Err(status(&problem))
            }
        }
    }
}

fn check_version(version: &str) -> Result<(), Problem> {
    if version == VERSION {
        return Ok(());
    }
    let message = format!(
        "requested API version {:?} is not supported; supported version is {VERSION:?}",
        shown(version)
    );
    Err(Problem::invalid(ProblemCode::VersionNotSupported, message))
}

fn resource(name: &str) -> Result<ExtendedResource, Problem> {
    ExtendedResource::new(name).map_err(|error| {
        Problem::invalid(
            ProblemCode::ResourceNotValid,
            format!("the ResourceName is invalid: {error}"),
        )
    })
}

fn status(problem: &Problem) -> Status {
    let code = match problem.kind {
        ProblemKind::Conflict => Code::Aborted,
        kind => grpc::code(kind),
    };
    Status::new(code, problem.message.as_str())
}

/// Shortens a plugin's text for the log.
fn shown(text: &str) -> String {
    text.chars().take(128).collect()
}

#[cfg(test)]
mod tests;
