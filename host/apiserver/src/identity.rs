//! Identity by which a client recognises the server and the server a client: a certificate, its key and a token.

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair};
use serde_json::json;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// The names in the certificate: a client may use any of them.
const NAMES: [&str; 3] = ["127.0.0.1", "::1", "localhost"];
/// The name of everything in a kubeconfig.
pub const KUBECONFIG_NAME: &str = "nodedock";

/// An identity that cannot be made or read.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot make a certificate for the API")]
    Generate(#[from] rcgen::Error),
    #[error("the certificate of the API is not PEM")]
    Certificate(#[source] rustls::pki_types::pem::Error),
    #[error("the key of the API is not PEM")]
    Key(#[source] rustls::pki_types::pem::Error),
    #[error("cannot use the certificate and the key of the API")]
    Tls(#[from] rustls::Error),
    #[error("the token of the API is empty")]
    NoToken,
}

/// The identity of a server on a machine. Its owner stores it where its user alone can read it.
#[derive(Clone)]
pub struct Identity {
    /// Self-signed, for the loopback addresses and `localhost`; without an end, as its only user is this machine.
    pub certificate_pem: String,
    pub key_pem: String,
    /// Token that clients send as `Authorization: Bearer`: 64 letters and digits of 244 random bits.
    pub token: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("certificate_pem", &self.certificate_pem)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// A new key, a certificate of it, and a new token.
    ///
    /// # Errors
    ///
    /// If the system has no randomness.
    pub fn generate() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(NAMES.map(str::to_owned).to_vec())?;
        params
            .distinguished_name
            .push(DnType::CommonName, KUBECONFIG_NAME);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate_pem = params.self_signed(&key)?.pem();
        let token = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()]
            .map(|half| half.simple().to_string())
            .concat();
        Ok(Self {
            certificate_pem,
            key_pem: key.serialize_pem(),
            token,
        })
    }

    /// Checks that a server can use it.
    ///
    /// # Errors
    ///
    /// The certificate, the key or the token is malformed, or the key is of another certificate.
    pub fn check(&self) -> Result<(), IdentityError> {
        self.server_config().map(drop)
    }

    pub(crate) fn server_config(&self) -> Result<ServerConfig, IdentityError> {
        if self.token.is_empty() {
            return Err(IdentityError::NoToken);
        }
        let certificate = CertificateDer::from_pem_slice(self.certificate_pem.as_bytes());
        let certificate = certificate.map_err(IdentityError::Certificate)?;
        let key =
            PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).map_err(IdentityError::Key)?;
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// The text of a kubeconfig file (JSON, which is YAML) for `server_url`, such as `https://127.0.0.1:6443`. It contains the token.
pub fn kubeconfig(server_url: &str, identity: &Identity) -> String {
    use base64::Engine;
    let authority = base64::engine::general_purpose::STANDARD.encode(&identity.certificate_pem);
    let cluster = json!({ "server": server_url, "certificate-authority-data": authority });
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": KUBECONFIG_NAME, "cluster": cluster }],
        "users": [{ "name": KUBECONFIG_NAME, "user": { "token": identity.token } }],
        "contexts": [{ "name": KUBECONFIG_NAME, "context": { "cluster": KUBECONFIG_NAME, "user": KUBECONFIG_NAME, "namespace": "default" } }],
        "current-context": KUBECONFIG_NAME,
    });
    format!("{config:#}\n")
}
