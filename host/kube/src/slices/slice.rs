//! A ResourceSlice as it is read and written, in whichever version of the API.

use std::collections::{BTreeMap, BTreeSet};

use crate::pools::PoolKey;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{NotUsed, Object, ObjectMeta};
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::entry::Entry;
use crate::facts::NodeFacts;
use nodedock_model::{DriverName, PoolName};

/// Label of every slice that nodedock writes: it identifies the slices of drivers that are gone.
pub(super) const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub(super) const NODEDOCK: &str = "nodedock";

pub(super) type Slice = Object<SliceSpec, NotUsed>;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SliceSpec {
    pub(super) driver: DriverName,
    #[serde(default)]
    pub(super) node_name: String,
    pub(super) pool: SlicePool,
    #[serde(flatten)]
    pub(super) content: Content,
    /// Content that nodedock sent, if the server changed it.
    #[serde(skip)]
    pub(super) sent: Option<Content>,
}

/// The pool that a slice belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SlicePool {
    pub(super) name: PoolName,
    pub(super) generation: i64,
    pub(super) resource_slice_count: i64,
}

/// The devices and counter sets of a slice or of a whole pool, by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    #[serde(default, with = "by_name", skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) devices: BTreeMap<String, Entry>,
    #[serde(default, with = "by_name", skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) shared_counters: BTreeMap<String, Entry>,
    #[serde(flatten)]
    pub(super) pool_fields: PoolFields,
}

/// Fields of a pool that each of its slices with devices has.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PoolFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) partition_type_attribute: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) skip_node_operations: Vec<String>,
}

/// Lists in the API are maps here, by the names of their items.
mod by_name {
    use super::*;

    pub(super) fn serialize<S: Serializer>(
        map: &BTreeMap<String, Entry>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map.values().map(Entry::json))
    }

    /// An item without a name, which no server returns, is left out and so overwritten.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, Entry>, D::Error> {
        let list = Option::<Vec<Value>>::deserialize(deserializer)?.unwrap_or_default();
        let named = list.into_iter().filter_map(|item| {
            let name = item.get("name")?.as_str()?.to_owned();
            Some((name, Entry::from(item)))
        });
        Ok(named.collect())
    }
}

impl Content {
    /// Lets devices share their memory with equal ones of another content. Those with taints keep their own, since the server adds times.
    pub(super) fn share(&mut self, with: &Self) {
        for (name, device) in &mut self.devices {
            if let Some(same) = with.devices.get(name).filter(|other| *other == device)
                && device.taints().next().is_none()
            {
                device.clone_from(same);
            }
        }
    }

    /// Returns the content without attributes that are lists; `None`: it has none.
    pub(super) fn without_lists(&self) -> Option<Self> {
        self.list_attributes().next()?;
        let mut content = self.clone();
        let devices = content
            .devices
            .values_mut()
            .filter(|device| device.list_attributes().next().is_some());
        devices.for_each(|device| *device = device.without_lists());
        Some(content)
    }

    /// Names of attributes that are lists, as often as devices have them.
    pub(super) fn list_attributes(&self) -> impl Iterator<Item = &String> {
        self.devices.values().flat_map(Entry::list_attributes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.shared_counters.is_empty()
    }
}

impl SliceSpec {
    pub(super) fn key(&self) -> PoolKey {
        PoolKey {
            driver: self.driver.clone(),
            pool: self.pool.name.clone(),
        }
    }

    /// Returns whether writing `content` would change nothing.
    pub(super) fn holds(&self, content: &Content) -> bool {
        self.content == *content || self.sent.as_ref() == Some(content)
    }

    /// Returns the fields of the `desired` pool that the server dropped or changed in this slice.
    pub(super) fn dropped(&self, desired: &Content) -> BTreeSet<String> {
        let mut fields = BTreeSet::new();
        let Some(sent) = &self.sent else {
            return fields;
        };
        let (ours, theirs) = (&sent.pool_fields, &self.content.pool_fields);
        if ours.partition_type_attribute != theirs.partition_type_attribute {
            fields.insert("partitionTypeAttribute".to_owned());
        }
        if ours.skip_node_operations != theirs.skip_node_operations {
            fields.insert("skipNodeOperations".to_owned());
        }
        for (name, device) in desired
            .devices
            .iter()
            .filter(|(name, _)| sent.devices.contains_key(*name))
        {
            device.dropped_in(self.content.devices.get(name), "devices[]", &mut fields);
        }
        for (name, set) in desired
            .shared_counters
            .iter()
            .filter(|_| !sent.shared_counters.is_empty())
        {
            set.dropped_in(
                self.content.shared_counters.get(name),
                "sharedCounters[]",
                &mut fields,
            );
        }
        fields
    }
}

pub(super) fn name(slice: &Slice) -> &str {
    slice.metadata.name.as_deref().unwrap_or_default()
}

/// Returns whether a slice is being deleted and a finalizer keeps it.
pub(super) fn is_terminating(slice: &Slice) -> bool {
    slice.metadata.deletion_timestamp.is_some()
}

/// Returns whether nodedock wrote a slice.
pub(super) fn is_ours(slice: &Slice) -> bool {
    has_our_label(slice)
}

pub(crate) fn has_our_label(slice: &impl ResourceExt) -> bool {
    slice
        .labels()
        .get(MANAGED_BY)
        .is_some_and(|manager| manager == NODEDOCK)
}

/// Returns whether a slice has the label and the owner that nodedock gives it.
pub(super) fn is_owned_by(slice: &Slice, node: &NodeFacts) -> bool {
    let mut owners = slice
        .owner_references()
        .iter()
        .filter(|owner| is_node(owner));
    owners.next() == Some(&owner(node)) && owners.next().is_none() && is_ours(slice)
}

/// Returns the metadata of a slice to be created.
pub(super) fn new_metadata(name_prefix: String, node: &NodeFacts) -> ObjectMeta {
    ObjectMeta {
        generate_name: Some(name_prefix),
        labels: Some([(MANAGED_BY.to_owned(), NODEDOCK.to_owned())].into()),
        owner_references: Some(vec![owner(node)]),
        ..ObjectMeta::default()
    }
}

/// Returns the metadata of a slice to be updated: what others added is kept.
pub(super) fn updated_metadata(slice: &Slice, node: &NodeFacts) -> ObjectMeta {
    let mut metadata = ObjectMeta {
        managed_fields: None,
        ..slice.metadata.clone()
    };
    metadata
        .labels
        .get_or_insert_default()
        .insert(MANAGED_BY.to_owned(), NODEDOCK.to_owned());
    let owners = metadata.owner_references.get_or_insert_default();
    owners.retain(|known| !is_node(known) && known.controller != Some(true));
    owners.push(owner(node));
    metadata
}

fn owner(node: &NodeFacts) -> OwnerReference {
    OwnerReference {
        api_version: Node::api_version(&()).into_owned(),
        kind: Node::kind(&()).into_owned(),
        name: node.name.to_string(),
        uid: node.uid.to_string(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

fn is_node(owner: &OwnerReference) -> bool {
    owner.kind == Node::kind(&()) && owner.api_version == Node::api_version(&())
}
