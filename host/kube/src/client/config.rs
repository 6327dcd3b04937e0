//! Address of the API server and credentials of requests to it: from a kubeconfig, or from the service account of a pod.

use std::path::{Path, PathBuf};

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::config::{AuthInfo, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

use super::files::{self, Files};
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

impl ClientConfig {
    /// The client, and the files that it was made of. Files are read, and a program for credentials is run, on a thread of their own;
    /// the client is made in the caller's runtime.
    pub(super) async fn load(&self) -> Result<(kube::Client, Files), ClientConfigError> {
        let (from, (config, files)) = match &self.kubeconfig {
            Some(path) => (path.display().to_string(), from_kubeconfig(path).await?),
            None => (SERVICE_ACCOUNT.to_owned(), from_service_account()?),
        };
        let making = tokio::task::spawn_blocking(move || client_of(config, &from)).await;
        let client = making.unwrap_or(Err(ClientConfigError::Interrupted))?;
        Ok((client, files::read(files).await))
    }
}

fn from_service_account() -> Result<(kube::Config, Vec<PathBuf>), ClientConfigError> {
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() {
        return Err(ClientConfigError::NotInCluster);
    }
    let config = kube::Config::incluster().map_err(ClientConfigError::ServiceAccount)?;
    Ok((
        config,
        ["token", "ca.crt"]
            .map(|file| Path::new(SERVICE_ACCOUNT).join(file))
            .to_vec(),
    ))
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
    let named = [&user.client_certificate, &user.client_key, &user.token_file];
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

/// The client under the layer: it repeats nothing by itself. `from` names the source of the configuration in errors.
fn client_of(mut config: kube::Config, from: &str) -> Result<kube::Client, ClientConfigError> {
    if config.cluster_url.scheme_str() == Some("http") {
        if has_credentials(&config.auth_info) && !is_this_machine(&config.cluster_url) {
            return Err(ClientConfigError::Plain(config.cluster_url.to_string()));
        }
        tracing::warn!(server = %config.cluster_url, "requests to the API server are not encrypted");
    }
    config.connect_timeout = Some(API_CONNECT);
    config.default_retry = false;
    config
        .headers
        .push((USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE)));
    kube::Client::try_from(config).map_err(|error| ClientConfigError::Client {
        from: from.to_owned(),
        what: chain(&error),
    })
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
