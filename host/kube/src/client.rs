//! The client of the API server: one connection, one rate, one set of counters for every request of the daemon.
//!
//! Given a kubeconfig or a pod's service account. Emits [`kube::Client`]s whose requests are limited in rate, number, time and size,
//! are counted, and show whether the API server is reachable; and which version of `resource.k8s.io` the server serves. It repeats
//! nothing but a request that was refused with credentials that have been replaced since, and a read whose connection broke.

mod config;
mod connection;
mod counts;
mod credentials;
mod error;
mod files;
mod rate;
mod reachability;
mod send;
#[cfg(test)]
pub(crate) mod tests;
mod version;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroup;
use kube::client::Body;
use kube::core::ApiResource;
use tokio::sync::watch as channel;
use tokio::time::{Instant, sleep};

pub use config::{ClientConfig, ClientConfigError};
pub use counts::{AnsweredLabels, RequestMetrics, Verb};
pub use error::{ApiError, ErrorKind};
pub use rate::RequestRate;
pub use reachability::Reachability;
pub use version::{DraResource, DraVersion};
pub(crate) use watch::{PAGE_ITEMS as WATCH_PAGE_ITEMS, meaning};

use self::credentials::Credentials;
use self::files::Files;
use self::rate::RateLimit;
pub(crate) use self::rate::Urgency;
use self::version::ServedVersion;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit;

/// Interval of checking whether an unreachable API server is back, without other requests.
const API_PROBE_PERIOD: Duration = Duration::from_secs(15);

/// Maximum of an API server's `Retry-After`.
const API_RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Backoff of failed requests that are retried; doubled up to the second.
pub(crate) const API_RETRY_MIN: Duration = Duration::from_millis(500);
pub(crate) const API_RETRY_MAX: Duration = Duration::from_secs(30);

/// Interval of looking whether the served version is to be read again.
const API_VERSION_LOOK: Duration = Duration::from_secs(60);

/// Deadline of connecting to the API server, and of a whole request.
const API_CONNECT: Duration = Duration::from_secs(5);
const API_REQUEST: Duration = Duration::from_secs(10);

/// Handle to the API server. Clones share the connection, the credentials, the rate, the counts and the served version.
#[derive(Clone)]
pub struct KubeClient {
    shared: Arc<RequestLayer>,
    usual: kube::Client,
    urgent: kube::Client,
}

/// A request with the name of its sender, which servers show as the manager of what it writes.
pub(crate) fn named<B>(mut request: http::Request<B>) -> http::Request<B> {
    let name = http::HeaderValue::from_static(config::USER_AGENT_VALUE);
    request.headers_mut().insert(http::header::USER_AGENT, name);
    request
}

struct RequestLayer {
    credentials: Credentials,
    rate: RateLimit,
    metrics: RequestMetrics,
    served: tokio::sync::Mutex<ServedVersion>,
    /// The last one, and when it was read.
    version: tokio::sync::Mutex<Option<(Instant, (u32, u32))>>,
    reachability: channel::Sender<Reachability>,
}

impl KubeClient {
    /// Reads the kubeconfig or the service account. The API server need not be reachable yet.
    pub async fn connect(config: ClientConfig) -> Result<Self, ClientConfigError> {
        Ok(Self::with_credentials(Credentials::load(config).await?))
    }

    /// A client of an API server in this process, which needs no credentials.
    pub fn in_process<S, B>(service: S) -> Self
    where
        S: tower::Service<
                http::Request<kube::client::Body>,
                Response = http::Response<B>,
                Error = tower::BoxError,
            > + Clone
            + Send
            + 'static,
        S::Future: Send + 'static,
        B: hyper::body::Body<Data = bytes::Bytes, Error: Into<tower::BoxError>> + Send + 'static,
    {
        let service = tower::ServiceExt::map_request(service, named);
        let client = kube::Client::new(service, "default");
        let rate = RequestRate {
            per_second: limit::API_PER_SECOND_MAX,
            burst: limit::API_BURST_MAX,
        };
        let config = ClientConfig {
            kubeconfig: None,
            rate,
        };
        Self::with_credentials(Credentials::new(config, client.into(), Files::default()))
    }

    fn with_credentials(credentials: Credentials) -> Self {
        let shared = Arc::new(RequestLayer {
            rate: RateLimit::new(credentials.config.rate),
            credentials,
            metrics: RequestMetrics::default(),
            served: tokio::sync::Mutex::default(),
            version: tokio::sync::Mutex::default(),
            reachability: channel::Sender::default(),
        });
        let usual = send::client(&shared, Urgency::Usual);
        let urgent = send::client(&shared, Urgency::Urgent);
        Self {
            shared,
            usual,
            urgent,
        }
    }

    /// Returns the client for requests that no pod waits for.
    pub fn client(&self) -> kube::Client {
        self.usual.clone()
    }

    /// Returns the client for requests that a pod waits for: they may take the last tokens of the rate.
    pub fn urgent(&self) -> kube::Client {
        self.urgent.clone()
    }

    /// Reads files with credentials again while the tasks run, and the served version, before a request has to. Without it, both are read
    /// after a refusal only.
    pub fn keep_ready(&self, tasks: &Tasks) {
        let client = self.clone();
        // Dropped anywhere, the last credentials and the last version stay.
        tasks.spawn_until_stopped("api-credentials", async move {
            tokio::join!(client.shared.credentials.keep(), client.renew_version());
        });
    }

    /// Reads the served version again when it is old and is used; never returns.
    async fn renew_version(&self) {
        loop {
            sleep(API_VERSION_LOOK).await;
            if self.shared.served.lock().await.is_due(Instant::now()) {
                let found = self.discover().await;
                // no error: a request uses the version that is known, or finds out itself
                let _ = self.learn_version(&mut *self.shared.served.lock().await, found);
            }
        }
    }

    /// Reads an object, as the server sends it.
    pub(crate) async fn read(&self, urgency: Urgency, path: &str) -> Result<Bytes, ApiError> {
        let request = http::Request::get(path).body(Body::empty());
        let request =
            request.map_err(|error| ApiError::new(ErrorKind::Invalid, error.to_string()))?;
        let answer = self.shared.send(urgency, request).await?;
        let body = answer.into_body().collect().await;
        let body = body.map_err(|error| ApiError::unreachable(chain(error.as_ref())))?;
        Ok(body.to_bytes())
    }

    /// Returns the major and minor version of the server, or `None` if it does not report it. Callers at the same time share an answer.
    pub(crate) async fn server_version(&self) -> Option<(u32, u32)> {
        let asked = Instant::now();
        let mut known = self.shared.version.lock().await;
        if let Some((_, version)) = known.filter(|(read, _)| *read >= asked) {
            return Some(version);
        }
        let began = Instant::now();
        // no error: the version is unknown then, and read again
        let version = self.client().apiserver_version().await.ok()?;
        let version = (number(&version.major)?, number(&version.minor)?);
        *known = Some((began, version));
        Some(version)
    }

    /// Returns the version of `resource.k8s.io` that the server serves, newest first. It is read again in the background every few minutes.
    pub async fn dra_version(&self) -> Result<DraVersion, ApiError> {
        let since = Instant::now();
        let mut served = self.shared.served.lock().await;
        if let Some(known) = served.known(since, Instant::now()) {
            return known;
        }
        let found = self.discover().await;
        self.learn_version(&mut served, found)
    }

    fn learn_version(
        &self,
        served: &mut ServedVersion,
        found: Result<DraVersion, ApiError>,
    ) -> Result<DraVersion, ApiError> {
        let before = served.version;
        let outcome = served.learn(found, Instant::now());
        if let Ok(version) = outcome
            && before != Some(version)
        {
            tracing::info!(
                version = version.as_str(),
                "uses this version of resource.k8s.io"
            );
        }
        outcome
    }

    /// A pod may wait for the answer.
    async fn discover(&self) -> Result<DraVersion, ApiError> {
        match self.group(self.urgent()).await {
            Ok(group) => version::choose(&group),
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::NotServed) => {
                Err(version::not_served(&[]))
            }
            Err(error) => Err(error),
        }
    }

    /// Every client may read it.
    async fn group(&self, client: kube::Client) -> Result<APIGroup, ApiError> {
        let request = http::Request::get("/apis/resource.k8s.io").body(Vec::new());
        let request =
            request.map_err(|error| ApiError::new(ErrorKind::Invalid, error.to_string()))?;
        Ok(client.request(request).await?)
    }

    /// Returns how DeviceTaintRules are served, in the newest version; `None`: they are not.
    pub(crate) async fn taint_rules(&self) -> Result<Option<ApiResource>, ApiError> {
        let group = match self.group(self.client()).await {
            Ok(group) => group,
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::NotServed) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        for resource in version::taint_rules(&group) {
            let served = self
                .client()
                .list_api_group_resources(&resource.api_version)
                .await?;
            if served
                .resources
                .iter()
                .any(|served| served.name == resource.plural)
            {
                return Ok(Some(resource));
            }
        }
        Ok(None)
    }

    /// Runs a request in the served version; once more in another one if that version is no longer served.
    pub async fn versioned<T, F>(
        &self,
        mut request: impl FnMut(DraVersion) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let version = self.dra_version().await?;
        match request(version).await {
            Err(error) if error.kind == ErrorKind::NotServed => {
                self.forget(version).await;
                let other = self.dra_version().await?;
                if other == version {
                    return Err(error);
                }
                request(other).await
            }
            outcome => outcome,
        }
    }

    async fn forget(&self, version: DraVersion) {
        self.shared
            .served
            .lock()
            .await
            .version
            .take_if(|known| *known == version);
    }

    pub fn metrics(&self) -> &RequestMetrics {
        &self.shared.metrics
    }
}

/// Distributions report `34+`.
fn number(text: &str) -> Option<u32> {
    text.trim_end_matches('+').parse::<u32>().ok()
}
