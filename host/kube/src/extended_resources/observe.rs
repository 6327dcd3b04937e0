//! What the API server says, as the switch of mechanisms needs it: versions, the Node object, slices, claims and DeviceClasses.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Resource as _, ResourceExt};
use serde_json::Value;

use super::classes::{Class, LABEL};
use super::decide::{Cluster, Version};
use super::switch::LocalPool;
use crate::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use crate::pools::PoolNames;
use nodedock_model::{DeviceName, DriverName, ExtendedResource, PoolName};

/// Objects in one answer of a list.
const PAGE_ITEMS: u32 = 500;
/// Objects of one kind that are read: a list beyond it fails, and nothing is switched.
const OBJECTS_MAX: usize = 500_000;

pub(super) struct Observer {
    pub(super) client: KubeClient,
    pub(super) names: PoolNames,
}

impl Observer {
    /// Reads the versions of the cluster, each as far as it can be read.
    pub(super) async fn cluster(&self) -> Cluster {
        let server = self
            .client
            .server_version()
            .await
            .map(|(major, minor)| Version { major, minor });
        let serves_v1 = match self.client.dra_version().await {
            Ok(version) => Some(version == DraVersion::V1),
            Err(error) if error.kind == ErrorKind::NotServed => Some(false),
            Err(_) => None,
        };
        // no error: the version of the kubelet is unknown then, and read again
        let node = self.node().await.ok().flatten();
        let kubelet = node.map(|node| {
            let info = node.status.and_then(|status| status.node_info);
            info.map(|info| info.kubelet_version).unwrap_or_default()
        });
        Cluster {
            server,
            serves_v1,
            kubelet,
        }
    }

    async fn node(&self) -> Result<Option<Node>, ApiError> {
        let name = self.names.node.as_str();
        let node = Api::<Node>::all(self.client.client()).get_opt(name).await?;
        if node
            .as_ref()
            .is_some_and(|node| node.meta().name.as_deref() != Some(name))
        {
            return Err(odd("the answer is about another node"));
        }
        Ok(node)
    }

    /// Reads the extended resources that the kubelet has allocatable; `None`: there is no Node object.
    pub(super) async fn allocatable(
        &self,
    ) -> Result<Option<BTreeMap<ExtendedResource, u64>>, ApiError> {
        let Some(node) = self.node().await? else {
            return Ok(None);
        };
        let allocatable = node
            .status
            .and_then(|status| status.allocatable)
            .unwrap_or_default();
        let of = |(name, quantity): (
            String,
            k8s_openapi::apimachinery::pkg::api::resource::Quantity,
        )| {
            // A number that is not understood, such as `2k`, is none that permits a switch.
            Some((
                ExtendedResource::new(name).ok()?,
                quantity.0.parse().unwrap_or(u64::MAX),
            ))
        };
        Ok(Some(allocatable.into_iter().filter_map(of).collect()))
    }

    /// Reads the pools of this node's drivers that have slices.
    pub(super) async fn published_pools(&self) -> Result<BTreeSet<LocalPool>, ApiError> {
        let fields = format!("spec.nodeName={}", self.names.node);
        let mut pools = BTreeSet::new();
        self.list(DraResource::Slices, &fields, |slice| {
            let text = |path: &str| {
                slice
                    .data
                    .pointer(path)
                    .and_then(Value::as_str)
                    .unwrap_or_default()
            };
            pools.extend(self.local(text("/spec/driver"), text("/spec/pool/name")));
        })
        .await?;
        Ok(pools)
    }

    /// Reads the devices of this node that claims have. Those with admin access do not count.
    pub(super) async fn allocated_devices(
        &self,
    ) -> Result<BTreeMap<LocalPool, BTreeSet<DeviceName>>, ApiError> {
        let mut devices: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        self.list(DraResource::Claims, "", |claim| {
            let results = claim
                .data
                .pointer("/status/allocation/devices/results")
                .and_then(Value::as_array);
            for result in results
                .into_iter()
                .flatten()
                .filter(|result| result["adminAccess"] != true)
            {
                let text = |key: &str| result[key].as_str().unwrap_or_default();
                let Some(pool) = self.local(text("driver"), text("pool")) else {
                    continue;
                };
                devices
                    .entry(pool)
                    .or_default()
                    .extend(DeviceName::new(text("device")));
            }
        })
        .await?;
        Ok(devices)
    }

    pub(super) async fn classes(&self) -> Result<Vec<Class>, ApiError> {
        let mut classes = Vec::new();
        self.list(DraResource::Classes, "", |class| {
            let label = class.labels().get(LABEL).map(String::as_str);
            classes.push(Class::of(class.name_any(), label, &class.data["spec"]));
        })
        .await?;
        Ok(classes)
    }

    /// The pool of this node that the API has under a name; `None`: it is of another node.
    fn local(&self, driver: &str, published: &str) -> Option<LocalPool> {
        let pool = PoolName::new(self.names.local(published)).ok()?;
        let is_here = self
            .names
            .published(&pool)
            .is_ok_and(|name| name.as_str() == published);
        Some(LocalPool {
            driver: DriverName::new(driver).ok()?,
            pool,
        })
        .filter(|_| is_here)
    }

    /// Reads every object of a kind, as it is now and not from a cache.
    async fn list(
        &self,
        resource: DraResource,
        fields: &str,
        mut each: impl FnMut(&DynamicObject),
    ) -> Result<(), ApiError> {
        let (mut parameters, mut count) = (ListParams::default().limit(PAGE_ITEMS), 0);
        if !fields.is_empty() {
            parameters = parameters.fields(fields);
        }
        loop {
            let page = self.client.versioned(|version| {
                let api: Api<DynamicObject> =
                    Api::all_with(self.client.client(), &version.resource(resource));
                let parameters = parameters.clone();
                async move { Ok(api.list(&parameters).await?) }
            });
            let page = page.await?;
            if page
                .metadata
                .resource_version
                .is_none_or(|version| version.is_empty())
            {
                return Err(odd("the answer is no list: it has no resource version"));
            }
            page.items.iter().for_each(&mut each);
            count += page.items.len();
            parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                return Ok(());
            }
            if count >= OBJECTS_MAX {
                return Err(odd(&format!(
                    "the cluster has more than {OBJECTS_MAX} objects of one kind"
                )));
            }
        }
    }
}

fn odd(what: &str) -> ApiError {
    ApiError::new(ErrorKind::NotKubernetes, what)
}
