//! The client that requests go through, and who we are in them. Both follow their files: tokens and certificates rotate.
//!
//! What can no longer be read changes nothing: the last good credentials go on, as in client-go.

use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tower::Layer;

use super::kubeconfig::{ApiConfig, ApiStartError, Loaded, load};
use nodedock_base::error::chain;
use nodedock_model::limit;

pub(super) struct Connection {
    /// None: there are no files to look at.
    config: Option<Arc<ApiConfig>>,
    live: ArcSwap<Live>,
    look: Mutex<Look>,
}

/// What a request goes through.
pub(super) struct Live {
    pub(super) client: kube::Client,
    pub(super) authorization: Option<HeaderValue>,
    transport: [u8; 32],
}

/// The last look at the files.
struct Look {
    at: Instant,
    failing: bool,
}

/// Nobody else hears what is said to it.
fn is_this_machine(server: &http::Uri) -> bool {
    let host = server.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

impl Connection {
    pub(super) async fn open(config: ApiConfig) -> Result<Self, ApiStartError> {
        let config = Arc::new(config);
        let loaded = read(&config).await?;
        if loaded.server.scheme_str() == Some("http") {
            if loaded.authorization.is_some() && !is_this_machine(&loaded.server) {
                return Err(ApiStartError::Plain(loaded.server.to_string()));
            }
            tracing::warn!(server = %loaded.server, "what is said to the API server is not encrypted");
        }
        let live = Live {
            client: client(&config, &loaded)?,
            transport: loaded.transport(),
            authorization: loaded.authorization,
        };
        Ok(Self {
            config: Some(config),
            live: ArcSwap::from_pointee(live),
            look: Mutex::new(Look { at: Instant::now(), failing: false }),
        })
    }

    /// One that has no files.
    #[cfg(test)]
    pub(super) fn fixed(client: kube::Client) -> Self {
        let live = Live { client, authorization: None, transport: [0; 32] };
        Self {
            config: None,
            live: ArcSwap::from_pointee(live),
            look: Mutex::new(Look { at: Instant::now(), failing: false }),
        }
    }

    /// What counts now; the files are looked at now and then.
    pub(super) async fn current(&self) -> Arc<Live> {
        // Who comes while somebody looks goes on with what there is.
        if let Ok(mut look) = self.look.try_lock()
            && look.at.elapsed() >= limit::API_CREDENTIALS_PERIOD
        {
            self.look(&mut look).await;
        }
        self.live.load_full()
    }

    /// After a refusal: whether there are other credentials than those that were used.
    pub(super) async fn is_other_than(&self, used: &Arc<Live>) -> bool {
        let mut look = self.look.lock().await;
        if Arc::ptr_eq(&self.live.load_full(), used) && look.at.elapsed() >= limit::API_CREDENTIALS_REST {
            self.look(&mut look).await;
        }
        !Arc::ptr_eq(&self.live.load_full(), used)
    }

    #[cfg(test)]
    pub(super) async fn look_now(&self) {
        self.look(&mut *self.look.lock().await).await;
    }

    async fn look(&self, look: &mut Look) {
        let Some(config) = &self.config else { return };
        let outcome = read(config).await.and_then(|loaded| self.take(config, loaded));
        look.at = Instant::now();
        let failing = std::mem::replace(&mut look.failing, outcome.is_err());
        match outcome {
            Err(error) if !failing => {
                tracing::warn!(
                    error = chain(&error),
                    "credentials cannot be read, the last ones are used on"
                );
            }
            Err(_) => {}
            Ok(changed) if changed || failing => tracing::info!(changed, "credentials are read again"),
            Ok(_) => {}
        }
    }

    /// Whether anything is new.
    fn take(&self, config: &ApiConfig, loaded: Loaded) -> Result<bool, ApiStartError> {
        let old = self.live.load_full();
        let transport = loaded.transport();
        if transport == old.transport && loaded.authorization == old.authorization {
            return Ok(false);
        }
        let same = transport == old.transport;
        let client = if same { old.client.clone() } else { client(config, &loaded)? };
        self.live.store(Arc::new(Live { client, transport, authorization: loaded.authorization }));
        Ok(true)
    }
}

async fn read(config: &Arc<ApiConfig>) -> Result<Loaded, ApiStartError> {
    let config = config.clone();
    tokio::task::spawn_blocking(move || load(&config)).await.unwrap_or(Err(ApiStartError::Interrupted))
}

fn client(config: &ApiConfig, loaded: &Loaded) -> Result<kube::Client, ApiStartError> {
    let from = match &config.kubeconfig {
        Some(path) => path.display().to_string(),
        None => config.service_account.display().to_string(),
    };
    let tls = |error: &kube::Error| ApiStartError::Tls { from: from.clone(), what: chain(error) };
    let mut settings = kube::Config::new(loaded.server.clone());
    settings.root_cert = loaded.roots.clone();
    settings.tls_server_name = loaded.server_name.clone();
    if let Some(identity) = &loaded.identity {
        settings.auth_info.client_certificate_data = Some(STANDARD.encode(&identity.certificate));
        settings.auth_info.client_key_data = Some(STANDARD.encode(&identity.key).into());
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(limit::API_CONNECT));
    tcp.set_keepalive(Some(limit::API_KEEPALIVE));
    let https = settings.rustls_https_connector_with_connector(tcp).map_err(|error| tls(&error))?;
    let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(limit::API_IDLE)
        .pool_max_idle_per_host(limit::API_IN_FLIGHT_MAX)
        .build::<_, Body>(https);
    Ok(kube::Client::new(settings.base_uri_layer().layer(http), "default"))
}

#[cfg(test)]
mod plain_tests {
    use super::*;

    #[test]
    fn without_encryption_credentials_go_to_this_machine_only() {
        let is_here = |server: &'static str| is_this_machine(&http::Uri::from_static(server));
        assert!(
            is_here("http://127.0.0.1:8080/")
                && is_here("http://[::1]:8080/")
                && is_here("http://localhost/")
        );
        assert!(
            !is_here("http://10.0.0.1:8080/")
                && !is_here("http://api.example.com/")
                && !is_here("http://localhost.example.com/")
        );
    }
}
