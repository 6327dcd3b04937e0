//! The objects of the local API as events: what is, what is gone, and after a list that there is nothing else.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{BoxStream, select_all};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

/// Namespace (empty for an object of the cluster) and name.
pub(super) type Key = (String, String);

#[derive(Debug)]
pub(super) enum Seen<K> {
    Is(Arc<K>),
    Gone(Key),
    Only(BTreeSet<Key>),
}

#[derive(Debug)]
pub(super) enum Change {
    Claim(Seen<ResourceClaim>),
    Class(Seen<DeviceClass>),
    Slice(Seen<ResourceSlice>),
    Pod(Seen<Pod>),
    Node(Seen<Node>),
}

pub(super) fn key(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// All objects that an allocation depends on. It never ends.
pub(super) fn changes(client: &kube::Client) -> impl Stream<Item = Change> + Send + use<> {
    let streams: [BoxStream<'static, Change>; 5] = [
        watched(Api::all(client.clone()), Change::Claim),
        watched(Api::all(client.clone()), Change::Class),
        watched(Api::all(client.clone()), Change::Slice),
        watched(Api::all(client.clone()), Change::Pod),
        watched(Api::all(client.clone()), Change::Node),
    ];
    select_all(streams)
}

fn watched<K>(api: Api<K>, of: fn(Seen<K>) -> Change) -> BoxStream<'static, Change>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut listed = BTreeSet::new();
    let events = watcher(api, watcher::Config::default()).default_backoff();
    let seen = events.filter_map(move |event| {
        let seen = match event {
            // The server is in this process: an error is a watch that fell behind, which lists again.
            Err(error) => {
                tracing::debug!(%error, "objects of the local API are listed again");
                None
            }
            Ok(Event::Init) => {
                listed.clear();
                None
            }
            Ok(Event::InitApply(object)) => {
                listed.insert(key(&object));
                Some(Seen::Is(Arc::new(object)))
            }
            Ok(Event::InitDone) => Some(Seen::Only(std::mem::take(&mut listed))),
            Ok(Event::Apply(object)) => Some(Seen::Is(Arc::new(object))),
            Ok(Event::Delete(object)) => Some(Seen::Gone(key(&object))),
        };
        std::future::ready(seen.map(of))
    });
    seen.boxed()
}
