//! The objects of the local API as events: what is, what is gone, and after a list that there is nothing else.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{BoxStream, select_all};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

/// Namespace (empty for an object of the cluster) and name.
pub(super) type Key = (String, String);

#[derive(Debug)]
pub(super) enum ObjectEvent<K> {
    Is(Arc<K>),
    Gone(Key),
    /// There are no others, but those of a later version than these.
    Only(BTreeSet<Key>, u64),
}

#[derive(Debug)]
pub(super) enum Change {
    Claim(ObjectEvent<ResourceClaim>),
    Class(ObjectEvent<DeviceClass>),
    Slice(ObjectEvent<ResourceSlice>),
    Template(ObjectEvent<ResourceClaimTemplate>),
    Pod(ObjectEvent<Pod>),
    Node(ObjectEvent<Node>),
}

pub(super) fn key(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// All objects that an allocation depends on. It never ends.
pub(super) fn changes(client: &kube::Client) -> impl Stream<Item = Change> + Send + use<> {
    let streams: [BoxStream<'static, Change>; 6] = [
        watched(all::<ResourceClaim>(client), Change::Claim),
        watched(all::<DeviceClass>(client), Change::Class),
        watched(all::<ResourceSlice>(client), Change::Slice),
        watched(all::<ResourceClaimTemplate>(client), Change::Template),
        watched(all::<Pod>(client), Change::Pod),
        watched(all::<Node>(client), Change::Node),
    ];
    select_all(streams)
}

fn all<K: Resource<DynamicType = ()>>(client: &kube::Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<K>(&()))
}

fn watched<K>(
    api: Api<DynamicObject>,
    of: fn(ObjectEvent<K>) -> Change,
) -> BoxStream<'static, Change>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let (mut listed, mut newest) = (BTreeSet::new(), 0);
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
                newest = 0;
                None
            }
            Ok(Event::InitApply(object)) => {
                listed.insert(key(&object));
                newest = newest.max(version(&object));
                Some(parsed(object))
            }
            Ok(Event::InitDone) => Some(ObjectEvent::Only(std::mem::take(&mut listed), newest)),
            Ok(Event::Apply(object)) => Some(parsed(object)),
            Ok(Event::Delete(object)) => Some(ObjectEvent::Gone(key(&object))),
        };
        std::future::ready(seen.map(of))
    });
    seen.boxed()
}

/// An object that this release cannot read is none to it, and holds up no other.
fn parsed<K: Resource + Clone + Debug + DeserializeOwned>(object: DynamicObject) -> ObjectEvent<K> {
    let key = key(&object);
    match object.try_parse() {
        Ok(object) => ObjectEvent::Is(Arc::new(object)),
        Err(error) => {
            let (namespace, name) = (&key.0, &key.1);
            tracing::warn!(namespace, name, %error, "an object of the local API is left out");
            ObjectEvent::Gone(key)
        }
    }
}

pub(super) fn version(object: &impl ResourceExt) -> u64 {
    object
        .resource_version()
        .and_then(|version| version.parse().ok())
        .unwrap_or_default()
}
