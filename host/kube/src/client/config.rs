//! Address of the API server and credentials of requests to it: from a kubeconfig, or from the service account of a pod.

use std::path::{Path, PathBuf};

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::config::{AuthInfo, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

use super::connection::{Connection, Transport, transport};
use super::files::{self, Files, Paths};
use super::{API_CONNECT, RequestRate};
use nodedock_base::error::chain;

/// Directory of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
pub(super) const USER_AGENT_VALUE: &str = concat!("nodedock/", env!("CARGO_PKG_VERSION"));

/// Configuration of the client of the API server.
#[derive(Debug, Clone, Default)]
pub struct ClientConfig {
    /// None: by the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    pub rate: RequestRate,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientConfigError {
    #[error("load the kubeconfig {path}")]
    Kubeconfig {
        path: PathBuf,
        source: KubeconfigError,
    },
    #[error("kubeconfig {path}: {what}")]
    Unusable { path: PathBuf, what: String },
    #[error(
        "no kubeconfig is given, and KUBERNETES_SERVICE_HOST is not set, as it would be in a pod; give --kubeconfig FILE, or turn Kubernetes off"
    )]
    NotInCluster,
    #[error("load the service account of the pod from {SERVICE_ACCOUNT}")]
    ServiceAccount(#[source] InClusterError),
    #[error(
        "{0} is not https, and credentials would be sent unencrypted: give the server as https"
    )]
    Plain(String),
    #[error("make a client of what {from} says: {what}")]
    Client { from: String, what: String },
    #[error("the files with the credentials could not be read to the end")]
    Interrupted,
}

/// What the files of a configuration say.
pub(super) struct Loaded {
    pub(super) connection: Connection,
    pub(super) files: Files,
}

/// A configuration, and where it comes from.
struct Source {
    /// For errors.
    from: String,
    config: kube::Config,
    paths: Paths,
}

impl ClientConfig {
    /// Reads the files. `before`: the connection to keep, if only the token is another one.
    ///
    /// Files are read, and a program for credentials is run, on a thread of their own; the connection is made in the caller's runtime.
    pub(super) async fn load(
        &self,
        before: Option<(&Connection, &Files)>,
    ) -> Result<Loaded, ClientConfigError> {
        // The digests first: what changes before the files are read again is found by the next check.
        let files = files::read(self.source().await?.paths).await;
        let Source {
            from, mut config, ..
        } = self.source().await?;
        check_encrypted(&config)?;
        let kept = before
            .filter(|(_, known)| known.have_same_connection(&files))
            .map(|(connection, _)| connection.transport.clone());
        let token = match token_file(&mut config.auth_info) {
            Some(path) => match read_token(&path).await {
                Ok(token) => Some(token),
                Err(what) => return Err(ClientConfigError::Client { from, what }),
            },
            None => None,
        };
        let transport = match kept {
            Some(kept) => kept,
            None => made(config, from).await?,
        };
        let connection = Connection { transport, token };
        Ok(Loaded { connection, files })
    }

    async fn source(&self) -> Result<Source, ClientConfigError> {
        let (from, (config, connection)) = match &self.kubeconfig {
            Some(path) => (path.display().to_string(), from_kubeconfig(path).await?),
            None => (SERVICE_ACCOUNT.to_owned(), from_service_account()?),
        };
        let token = token_file(&mut config.auth_info.clone());
        let paths = Paths { connection, token };
        Ok(Source {
            from,
            config,
            paths,
        })
    }
}

/// Takes the file of the token that requests are sent with, if they are sent with that of a file: what has precedence is left to the client.
fn token_file(user: &mut AuthInfo) -> Option<PathBuf> {
    let has_other = user.auth_provider.is_some()
        || (user.username.is_some() && user.password.is_some())
        || user.token.is_some();
    let path = user.token_file.take_if(|_| !has_other)?;
    // A token of a file has precedence over a program.
    user.exec = None;
    Some(PathBuf::from(path))
}

async fn read_token(path: &Path) -> Result<HeaderValue, String> {
    let text = tokio::fs::read_to_string(path).await;
    let text = text.map_err(|error| format!("read the token {}: {error}", path.display()))?;
    if text.trim().is_empty() {
        return Err(format!("{} holds no token", path.display()));
    }
    let value = HeaderValue::try_from(format!("Bearer {}", text.trim()));
    let mut value = value.map_err(|error| format!("the token {}: {error}", path.display()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// `from`: for errors.
async fn made(mut config: kube::Config, from: String) -> Result<Transport, ClientConfigError> {
    config
        .headers
        .push((USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE)));
    config.connect_timeout = Some(API_CONNECT);
    config.default_retry = false;
    let making = tokio::task::spawn_blocking(move || transport(config)).await;
    match making {
        Ok(made) => made.map_err(|error| ClientConfigError::Client {
            from,
            what: chain(error.as_ref()),
        }),
        Err(_) => Err(ClientConfigError::Interrupted),
    }
}

fn from_service_account() -> Result<(kube::Config, Vec<PathBuf>), ClientConfigError> {
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() {
        return Err(ClientConfigError::NotInCluster);
    }
    let config = kube::Config::incluster().map_err(ClientConfigError::ServiceAccount)?;
    Ok((config, vec![Path::new(SERVICE_ACCOUNT).join("ca.crt")]))
}

async fn from_kubeconfig(path: &Path) -> Result<(kube::Config, Vec<PathBuf>), ClientConfigError> {
    let failed = |source| ClientConfigError::Kubeconfig {
        path: path.to_owned(),
        source,
    };
    let unusable = |what: String| ClientConfigError::Unusable {
        path: path.to_owned(),
        what,
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    let authority = authority_of(&kubeconfig);
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .map_err(failed)?;
    if !matches!(config.cluster_url.scheme_str(), Some("https" | "http"))
        || config.cluster_url.host().is_none()
    {
        return Err(unusable(format!(
            "the server is {:?}, and https://HOST:PORT is needed",
            config.cluster_url
        )));
    }
    if config.accept_invalid_certs {
        let what = "insecure-skip-tls-verify is set: give certificate-authority, so that the server is verified";
        return Err(unusable(what.to_owned()));
    }
    if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
        let file = authority
            .as_ref()
            .map_or("certificate-authority-data".to_owned(), |file| {
                file.display().to_string()
            });
        return Err(unusable(format!("{file} holds no certificate in PEM form")));
    }
    let user = &config.auth_info;
    let named = [&user.client_certificate, &user.client_key];
    let files = named
        .into_iter()
        .flatten()
        .map(PathBuf::from)
        .chain(authority)
        .chain([path.to_owned()]);
    let files = files.collect();
    Ok((config, files))
}

/// The file with the certificate authority of the current context's cluster.
fn authority_of(kubeconfig: &Kubeconfig) -> Option<PathBuf> {
    let name = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig
        .contexts
        .iter()
        .find(|context| context.name == *name)?
        .context
        .as_ref()?;
    let cluster = kubeconfig
        .clusters
        .iter()
        .find(|cluster| cluster.name == context.cluster)?;
    cluster
        .cluster
        .as_ref()?
        .certificate_authority
        .as_ref()
        .map(PathBuf::from)
}

/// Refuses to send credentials to another machine unencrypted.
fn check_encrypted(config: &kube::Config) -> Result<(), ClientConfigError> {
    if config.cluster_url.scheme_str() != Some("http") {
        return Ok(());
    }
    if has_credentials(&config.auth_info) && !is_this_machine(&config.cluster_url) {
        return Err(ClientConfigError::Plain(config.cluster_url.to_string()));
    }
    tracing::warn!(server = %config.cluster_url, "requests to the API server are not encrypted");
    Ok(())
}

fn has_credentials(user: &AuthInfo) -> bool {
    user.token.is_some()
        || user.token_file.is_some()
        || user.username.is_some()
        || user.exec.is_some()
        || user.auth_provider.is_some()
}

/// No other machine sees what is sent there.
fn is_this_machine(server: &http::Uri) -> bool {
    let host = server.host().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}
