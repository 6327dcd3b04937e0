//! Watches of `resource.k8s.io`: [`watcher`] in the version that is served now.

use futures::stream::{BoxStream, Stream, StreamExt, unfold};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, WatchEvent, WatchParams};
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};

use super::{API_RETRY_MAX, ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use nodedock_model::ObjectName;

/// Objects in one answer of a list.
pub(crate) const PAGE_ITEMS: u32 = 250;

impl KubeClient {
    /// Lists and watches claims or slices with a field selector, in one namespace or in all. With `since`, the version of what is known
    /// already, it does not list at first; [`Event::InitDone`] then says that the watch is open. The stream never ends: after an error,
    /// which it logs, it waits as client-go does and lists again. `what` is for the log: `slices of this node`.
    pub fn watch(
        &self,
        what: &'static str,
        resource: DraResource,
        namespace: Option<ObjectName>,
        fields: String,
        since: Option<String>,
    ) -> impl Stream<Item = Result<Event<DynamicObject>, ApiError>> + Send + use<> {
        let watch = Watch {
            client: self.clone(),
            what,
            resource,
            namespace,
            fields,
            since,
            events: None,
            backoff: DefaultBackoff::default(),
            failed: false,
            reported: false,
        };
        unfold(watch, |mut watch| async move {
            let event = watch.next().await;
            Some((event, watch))
        })
    }
}

struct Watch {
    client: KubeClient,
    what: &'static str,
    resource: DraResource,
    namespace: Option<ObjectName>,
    fields: String,
    since: Option<String>,
    events: Option<(
        DraVersion,
        BoxStream<'static, watcher::Result<Event<DynamicObject>>>,
    )>,
    /// Starts again after two minutes without a failure.
    backoff: DefaultBackoff,
    failed: bool,
    /// A failure was logged, and its end was not.
    reported: bool,
}

impl Watch {
    async fn next(&mut self) -> Result<Event<DynamicObject>, ApiError> {
        if std::mem::take(&mut self.failed) {
            tokio::time::sleep(self.backoff.next().unwrap_or(API_RETRY_MAX)).await;
        }
        let event = self.event().await;
        match &event {
            Ok(Event::Init) => {}
            Ok(_) if std::mem::take(&mut self.reported) => {
                tracing::info!(what = self.what, "watched again")
            }
            Ok(_) => {}
            Err(error) => {
                self.failed = true;
                self.report(error);
            }
        }
        event
    }

    /// Logs the first failure. An unreachable API server is a condition of the node.
    fn report(&mut self, error: &ApiError) {
        use ErrorKind::{Expired, Throttled};
        let is_expected = error.is_unreachable() || matches!(error.kind, Expired | Throttled);
        if is_expected || std::mem::replace(&mut self.reported, true) {
            tracing::debug!(what = self.what, %error, "cannot be watched now");
        } else {
            tracing::warn!(what = self.what, %error, "cannot be watched, retrying");
        }
    }

    async fn event(&mut self) -> Result<Event<DynamicObject>, ApiError> {
        let (version, mut events) = match self.events.take() {
            Some(open) => open,
            None => {
                let version = self.client.dra_version().await?;
                (version, self.open(version))
            }
        };
        let event = events
            .next()
            .await
            .unwrap_or(Err(watcher::Error::NoResourceVersion))
            .map_err(meaning);
        match &event {
            Ok(_) => self.events = Some((version, events)),
            Err(error) if error.kind == ErrorKind::NotServed => self.client.forget(version).await,
            Err(_) => {}
        }
        event
    }

    fn open(
        &mut self,
        version: DraVersion,
    ) -> BoxStream<'static, watcher::Result<Event<DynamicObject>>> {
        let (client, resource) = (self.client.client(), version.resource(self.resource));
        let api: Api<DynamicObject> = match &self.namespace {
            Some(namespace) => Api::namespaced_with(client, namespace.as_str(), &resource),
            None => Api::all_with(client, &resource),
        };
        if let Some(since) = self.since.take() {
            let params = WatchParams::default().fields(&self.fields);
            return ResumedWatch {
                api,
                params,
                since,
                open: None,
            }
            .events()
            .boxed();
        }
        let config = watcher::Config::default()
            .fields(&self.fields)
            .page_size(PAGE_ITEMS);
        watcher(api, config).boxed()
    }
}

/// A watch from a version on: what [`watcher`] does after its list.
struct ResumedWatch {
    api: Api<DynamicObject>,
    params: WatchParams,
    since: String,
    open: Option<BoxStream<'static, kube::Result<WatchEvent<DynamicObject>>>>,
}

impl ResumedWatch {
    fn events(self) -> impl Stream<Item = watcher::Result<Event<DynamicObject>>> + Send {
        unfold(self, |mut watch| async move {
            let event = watch.next().await;
            Some((event, watch))
        })
    }

    async fn next(&mut self) -> watcher::Result<Event<DynamicObject>> {
        loop {
            let Some(open) = &mut self.open else {
                let opened = self.api.watch(&self.params, &self.since).await;
                self.open = Some(opened.map_err(watcher::Error::WatchStartFailed)?.boxed());
                return Ok(Event::InitDone);
            };
            let event = match open
                .next()
                .await
                .transpose()
                .map_err(watcher::Error::WatchFailed)?
            {
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                    Event::Apply(object)
                }
                Some(WatchEvent::Deleted(object)) => Event::Delete(object),
                Some(WatchEvent::Bookmark(bookmark)) => {
                    self.since = bookmark.metadata.resource_version;
                    continue;
                }
                Some(WatchEvent::Error(status)) => return Err(watcher::Error::WatchError(status)),
                // The server ends each watch after some minutes.
                None => {
                    self.open = None;
                    continue;
                }
            };
            if let Event::Apply(object) | Event::Delete(object) = &event {
                self.since = object
                    .resource_version()
                    .ok_or(watcher::Error::NoResourceVersion)?;
            }
            return Ok(event);
        }
    }
}

/// Converts an error of a watch.
pub(crate) fn meaning(error: watcher::Error) -> ApiError {
    use watcher::Error;
    match error {
        Error::InitialListFailed(error)
        | Error::WatchStartFailed(error)
        | Error::WatchFailed(error) => error.into(),
        Error::WatchError(status) => ApiError::of_status(&status),
        other => ApiError::new(ErrorKind::NotKubernetes, other.to_string()),
    }
}
