//! Where the API server is and who we are for it: a kubeconfig, or what a pod is given.
//!
//! Reads files and gives what they say; asks nobody. What a daemon cannot use (programs that fetch tokens, proxies, servers that are
//! not verified, acting for others) is refused by its key.

use std::io::Read;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderValue, Uri};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::rate::Pace;
use nodedock_model::limit;

/// Where a pod finds its service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How the API server is found.
#[derive(Debug, Clone)]
pub struct ApiConfig {
    /// None: as in a pod.
    pub kubeconfig: Option<PathBuf>,
    /// `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`.
    pub service_host: Option<String>,
    pub service_port: Option<String>,
    /// Folder with `token` and `ca.crt`.
    pub service_account: PathBuf,
    pub pace: Pace,
}

impl ApiConfig {
    /// By a kubeconfig, or by what the environment of a pod says.
    pub fn new(kubeconfig: Option<PathBuf>) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            kubeconfig,
            service_host: variable("KUBERNETES_SERVICE_HOST"),
            service_port: variable("KUBERNETES_SERVICE_PORT"),
            service_account: PathBuf::from(SERVICE_ACCOUNT),
            pace: Pace::default(),
        }
    }
}

/// Why there is no way to an API server.
#[derive(Debug, thiserror::Error)]
pub enum ApiStartError {
    #[error("read the kubeconfig {path}")]
    Kubeconfig { path: PathBuf, source: std::io::Error },
    #[error("the kubeconfig {path} is no YAML of a kubeconfig")]
    Syntax { path: PathBuf, source: Box<serde_saphyr::Error> },
    #[error("kubeconfig {path}: {key} {what}")]
    Key { path: PathBuf, key: String, what: String },
    #[error(
        "no kubeconfig is given, and {0} is not set, as it would be in a pod; give --kubeconfig FILE, or turn Kubernetes off"
    )]
    NotInCluster(&'static str),
    #[error("the service account's {path}: {what}")]
    ServiceAccount { path: PathBuf, what: String },
    #[error("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are no address: {0}")]
    ServiceAddress(String),
    #[error("{0} has no https, and credentials would be read by whoever listens: name the server by https")]
    Plain(String),
    #[error("make a TLS client of what {from} says: {what}")]
    Tls { from: String, what: String },
    #[error("the files with the credentials could not be read to the end")]
    Interrupted,
}

/// What the files say now.
pub(super) struct Loaded {
    pub(super) server: Uri,
    /// DER; None: those of the machine.
    pub(super) roots: Option<Vec<Vec<u8>>>,
    pub(super) identity: Option<Identity>,
    pub(super) server_name: Option<String>,
    pub(super) authorization: Option<HeaderValue>,
}

/// PEM.
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

impl Loaded {
    /// A digest of everything but what is sent with each request: another one needs another connection.
    pub(super) fn transport(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(self.server.to_string().as_bytes());
        add(self.server_name.as_deref().unwrap_or_default().as_bytes());
        for root in self.roots.iter().flatten() {
            add(root);
        }
        if let Some(identity) = &self.identity {
            add(&identity.certificate);
            add(&identity.key);
        }
        hash.finalize().into()
    }
}

pub(super) fn load(config: &ApiConfig) -> Result<Loaded, ApiStartError> {
    match &config.kubeconfig {
        Some(path) => from_kubeconfig(path),
        None => from_pod(config),
    }
}

fn from_pod(config: &ApiConfig) -> Result<Loaded, ApiStartError> {
    let host =
        config.service_host.as_deref().ok_or(ApiStartError::NotInCluster("KUBERNETES_SERVICE_HOST"))?;
    let port =
        config.service_port.as_deref().ok_or(ApiStartError::NotInCluster("KUBERNETES_SERVICE_PORT"))?;
    let host =
        if host.contains(':') { format!("[{}]", host.trim_matches(['[', ']'])) } else { host.to_owned() };
    let address = format!("https://{host}:{port}");
    let server =
        address.parse().map_err(|error| ApiStartError::ServiceAddress(format!("{address}: {error}")))?;
    let at = |path: &Path, what| ApiStartError::ServiceAccount { path: path.to_owned(), what };
    let (token, ca) = (config.service_account.join("token"), config.service_account.join("ca.crt"));
    let text = bytes_of(&token).map_err(|what| at(&token, what))?;
    let authorization = bearer(&text).map_err(|what| at(&token, what))?;
    let pem = bytes_of(&ca).map_err(|what| at(&ca, what))?;
    let roots = certificates(&pem).map_err(|what| at(&ca, what))?;
    Ok(Loaded {
        server,
        roots: Some(roots),
        identity: None,
        server_name: None,
        authorization: Some(authorization),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    current_context: Option<String>,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Option<Context>,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: Option<String>,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Option<Cluster>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: Option<String>,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: Option<bool>,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: Option<User>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<String>,
    password: Option<String>,
    exec: Option<serde_json::Value>,
    auth_provider: Option<serde_json::Value>,
    #[serde(rename = "as")]
    acts_as: Option<serde_json::Value>,
    as_uid: Option<serde_json::Value>,
    as_groups: Option<serde_json::Value>,
    as_user_extra: Option<serde_json::Value>,
}

/// A kubeconfig at its path: what an error is about.
struct At<'a>(&'a Path);

impl At<'_> {
    fn key(&self, key: impl Into<String>, what: impl Into<String>) -> ApiStartError {
        ApiStartError::Key { path: self.0.to_owned(), key: key.into(), what: what.into() }
    }

    /// The bytes of a key in its two forms: in the file, or in a file beside it.
    fn bytes(
        &self,
        key: &str,
        data: Option<&str>,
        path: Option<&PathBuf>,
    ) -> Result<Option<Vec<u8>>, ApiStartError> {
        if let Some(data) = data.filter(|data| !data.is_empty()) {
            let decoded = STANDARD.decode(data.trim());
            return decoded
                .map(Some)
                .map_err(|error| self.key(format!("{key}-data"), format!("is no base64: {error}")));
        }
        let Some(path) = path.filter(|path| !path.as_os_str().is_empty()) else { return Ok(None) };
        let path = self.0.parent().unwrap_or(Path::new("")).join(path);
        let read = bytes_of(&path).map_err(|what| self.key(key, format!("names {}: {what}", path.display())));
        read.map(Some)
    }
}

fn from_kubeconfig(path: &Path) -> Result<Loaded, ApiStartError> {
    let at = At(path);
    let read = |source| ApiStartError::Kubeconfig { path: path.to_owned(), source };
    let bytes = bounded_read(path).map_err(read)?;
    let text = String::from_utf8(bytes).map_err(|error| read(std::io::Error::other(error.utf8_error())))?;
    let syntax = |error| ApiStartError::Syntax { path: path.to_owned(), source: Box::new(error) };
    let config: Kubeconfig = serde_saphyr::from_str(&text).map_err(syntax)?;
    let name = config.current_context.as_deref().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| at.key("current-context", "is not set"))?;
    let context = config.contexts.iter().find(|context| context.name == name);
    let context = context
        .and_then(|named| named.context.as_ref())
        .ok_or_else(|| at.key("current-context", format!("is {name:?}, which contexts does not have")))?;
    let cluster_name = &context.cluster;
    let cluster = config.clusters.iter().find(|cluster| cluster.name == *cluster_name);
    let cluster = cluster.and_then(|named| named.cluster.as_ref()).ok_or_else(|| {
        at.key(
            format!("contexts[{name}].context.cluster"),
            format!("is {cluster_name:?}, which clusters does not have"),
        )
    })?;
    let loaded = from_cluster(&at, &format!("clusters[{cluster_name}].cluster"), cluster)?;
    let Some(user_name) = context.user.as_deref().filter(|name| !name.is_empty()) else { return Ok(loaded) };
    let user = config.users.iter().find(|user| user.name == user_name).ok_or_else(|| {
        at.key(
            format!("contexts[{name}].context.user"),
            format!("is {user_name:?}, which users does not have"),
        )
    })?;
    let none = User::default();
    with_user(&at, &format!("users[{user_name}].user"), user.user.as_ref().unwrap_or(&none), loaded)
}

fn from_cluster(at: &At<'_>, key: &str, cluster: &Cluster) -> Result<Loaded, ApiStartError> {
    let server_key = format!("{key}.server");
    let server = cluster.server.as_deref().ok_or_else(|| at.key(&server_key, "is not set"))?;
    let parsed: Uri =
        server.parse().map_err(|error| at.key(&server_key, format!("is {server:?}: {error}")))?;
    if !matches!(parsed.scheme_str(), Some("https" | "http")) || parsed.host().is_none() {
        return Err(at.key(server_key, format!("is {server:?}, and https://HOST:PORT is wanted")));
    }
    if cluster.insecure_skip_tls_verify == Some(true) {
        let what = "is set: a server that is not verified gets no token of ours; give certificate-authority";
        return Err(at.key(format!("{key}.insecure-skip-tls-verify"), what));
    }
    if cluster.proxy_url.as_ref().is_some_and(|proxy| !proxy.is_empty()) {
        return Err(at.key(format!("{key}.proxy-url"), "is set: proxies are not used"));
    }
    let ca_key = format!("{key}.certificate-authority");
    let data = cluster.certificate_authority_data.as_deref();
    let pem = at.bytes(&ca_key, data, cluster.certificate_authority.as_ref())?;
    let roots = pem.map(|pem| certificates(&pem).map_err(|what| at.key(ca_key, what))).transpose()?;
    let server_name = cluster.tls_server_name.clone().filter(|name| !name.is_empty());
    Ok(Loaded { server: parsed, roots, identity: None, server_name, authorization: None })
}

fn with_user(at: &At<'_>, key: &str, user: &User, loaded: Loaded) -> Result<Loaded, ApiStartError> {
    let unusable = [
        ("exec", &user.exec, "programs are not run for credentials"),
        ("auth-provider", &user.auth_provider, "programs are not run for credentials"),
        ("as", &user.acts_as, "the daemon acts for itself only"),
        ("as-uid", &user.as_uid, "the daemon acts for itself only"),
        ("as-groups", &user.as_groups, "the daemon acts for itself only"),
        ("as-user-extra", &user.as_user_extra, "the daemon acts for itself only"),
    ];
    if let Some((name, _, why)) = unusable.into_iter().find(|(_, value, _)| value.is_some()) {
        let what = format!("is set: {why}; give tokenFile, token or a client certificate");
        return Err(at.key(format!("{key}.{name}"), what));
    }
    let (certificate_key, key_key) = (format!("{key}.client-certificate"), format!("{key}.client-key"));
    let data = user.client_certificate_data.as_deref();
    let certificate = at.bytes(&certificate_key, data, user.client_certificate.as_ref())?;
    let private = at.bytes(&key_key, user.client_key_data.as_deref(), user.client_key.as_ref())?;
    let identity = match (certificate, private) {
        (Some(certificate), Some(private)) => {
            certificates(&certificate).map_err(|what| at.key(certificate_key, what))?;
            Some(Identity { certificate, key: private })
        }
        (None, None) => None,
        (Some(_), None) => return Err(at.key(key_key, "is not set, and its certificate is")),
        (None, Some(_)) => return Err(at.key(certificate_key, "is not set, and its key is")),
    };
    let authorization = authorization(at, key, user)?;
    Ok(Loaded { identity, authorization, ..loaded })
}

/// As in client-go a token in the file comes before one in a file beside it.
fn authorization(at: &At<'_>, key: &str, user: &User) -> Result<Option<HeaderValue>, ApiStartError> {
    if let Some(token) = user.token.as_deref().filter(|token| !token.is_empty()) {
        return bearer(token.as_bytes()).map(Some).map_err(|what| at.key(format!("{key}.token"), what));
    }
    let token_key = format!("{key}.tokenFile");
    if let Some(token) = at.bytes(&token_key, None, user.token_file.as_ref())? {
        return bearer(&token).map(Some).map_err(|what| at.key(token_key, what));
    }
    let Some(name) = &user.username else { return Ok(None) };
    let password = user.password.as_deref().unwrap_or_default();
    let value = format!("Basic {}", STANDARD.encode(format!("{name}:{password}")));
    secret(&value).map(Some).map_err(|what| at.key(format!("{key}.username"), what))
}

fn bearer(token: &[u8]) -> Result<HeaderValue, String> {
    let token = std::str::from_utf8(token).map_err(|_| "holds no token: it is no text".to_owned())?.trim();
    if token.is_empty() {
        return Err("holds no token: it is empty".to_owned());
    }
    secret(&format!("Bearer {token}"))
}

/// It is not shown when it is printed.
fn secret(value: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::from_str(value)
        .map_err(|_| "holds no token: there are line breaks or other control characters in it".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, String> {
    bounded_read(path).map_err(|error| error.to_string())
}

fn bounded_read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(limit::API_CREDENTIALS_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit::API_CREDENTIALS_BYTES_MAX {
        let words = format!("it is larger than {} bytes", limit::API_CREDENTIALS_BYTES_MAX);
        return Err(std::io::Error::other(words));
    }
    Ok(bytes)
}

/// The certificates of a PEM text, as DER; there is one at least.
fn certificates(pem: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let text = std::str::from_utf8(pem).map_err(|_| "holds no certificate in PEM form".to_owned())?;
    let mut found = Vec::new();
    for part in text.split(BEGIN).skip(1) {
        let (body, _) = part.split_once(END).ok_or("holds a certificate that is cut off".to_owned())?;
        let body: String = body.split_whitespace().collect();
        let der =
            STANDARD.decode(body).map_err(|error| format!("holds a certificate that is no PEM: {error}"))?;
        found.push(der);
    }
    if found.is_empty() {
        return Err("holds no certificate in PEM form".to_owned());
    }
    Ok(found)
}

#[cfg(test)]
#[path = "kubeconfig_tests.rs"]
mod tests;
