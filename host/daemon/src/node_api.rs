//! The node API on its Unix socket.

mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nodedock_proto::node::v1::node_server::{Node, NodeServer};
use nodedock_proto::node::v1::{self, *};
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

pub use self::users::serve_users;

use crate::device_names::DeviceNames;
use crate::recording::{Lines, RecordedDrivers};
use crate::{convert, health};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::grpc::{begin, status};
use nodedock_base::tasks::Tasks;
use nodedock_base::users as machine_users;
use nodedock_core::adapters::AdapterView;
use nodedock_core::checkpoint::Checkpoint;
use nodedock_core::driver::{Driver, NodeFacts};
use nodedock_core::manager::devices::{Capacity, ResourceSource};
use nodedock_core::manager::{self, Manager, PodView};
use nodedock_core::pools::NodePools;
use nodedock_core::registry::Registry;
use nodedock_kube::extended_resources::ExtendedResources;
use nodedock_kube::local::LocalClaims;
use nodedock_kube::taints::DeviceTaints;
use nodedock_model::{
    Caller, DriverName, ExtendedResource, HealthState, ObjectRef, Problem, ProblemCode,
    is_plugin_driver, limit,
};

/// The service, with the managers that it calls.
#[derive(Clone)]
pub struct NodeApi {
    pub manager: Arc<Manager>,
    pub registry: Registry,
    pub pools: NodePools,
    pub changes: Changes,
    pub conditions: Conditions,
    pub checkpoint: Checkpoint,
    pub node: NodeFacts,
    /// Present on a Kubernetes node, and on one with the local API.
    pub taints: Option<DeviceTaints>,
    /// Present on a machine with the local API.
    pub local_claims: Option<LocalClaims>,
    /// Each client may only use the claims of its user's namespace.
    pub is_for_users: bool,
    pub device_names: DeviceNames,
    /// The daemon runs on a recorded machine.
    pub recorded_hardware: bool,
    /// Start of the daemon, in milliseconds since the Unix epoch.
    pub started_ms: u64,
    pub recorded: RecordedDrivers,
    pub tasks: Tasks,
    /// Present on a Kubernetes node.
    pub extended_resources: Option<ExtendedResources>,
}

/// Serves until the tasks stop; calls in flight are answered first.
pub async fn serve(api: NodeApi, listener: UnixListener) {
    let (tasks, takes_writes) = (api.tasks.clone(), api.checkpoint.takes_writes());
    let stopped = tasks.stopped();
    let (reporter, health) = tonic_health::server::health_reporter();
    let service = NodeServer::new(api)
        .max_decoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX);
    let server = tonic::transport::Server::builder()
        .add_service(service)
        .add_service(health);
    tasks.spawn(
        "health",
        health::report::<NodeServer<NodeApi>>(reporter, takes_writes, tasks.clone()),
    );
    if let Err(error) = server
        .serve_with_incoming_shutdown(unix::incoming(listener), stopped)
        .await
    {
        tracing::error!(error = chain(&error), "the node api ended");
    }
}

/// The process that called, by the credentials of its socket.
fn caller<T>(request: &Request<T>) -> Caller {
    let peer = request
        .extensions()
        .get::<UdsConnectInfo>()
        .and_then(|info| info.peer_cred);
    let uid = peer.map(|peer| peer.uid());
    Caller {
        uid,
        user: uid.and_then(machine_users::name),
        pid: peer.and_then(|peer| peer.pid()),
    }
}

type RpcResult<T> = Result<Response<T>, Status>;

fn stopping() -> Problem {
    Problem::unavailable(ProblemCode::HandingOver, "the daemon stops")
}

/// Maximum number of times that the claims of one prepare are allocated: each repetition means that another claim has a device that this
/// one would have got.
const LOCAL_TRIES_MAX: usize = 8;

fn refuse(problem: Problem) -> Status {
    status(&problem)
}

#[tonic::async_trait]
impl Node for NodeApi {
    async fn prepare_pod(
        &self,
        request: Request<PreparePodRequest>,
    ) -> RpcResult<PreparePodResponse> {
        let request_id = begin("PreparePod", &request);
        let (pod, inline) = convert::pod_request(request.get_ref()).map_err(refuse)?;
        if let Some(own) = self.confined(&request)? {
            Self::check_own(&own, &pod, &inline)?;
        }
        let namespace = pod.pod.namespace.clone();
        let inline: Vec<_> = inline
            .into_iter()
            .map(|claim| self.pools.localized(claim))
            .collect();
        let outcome = match &self.local_claims {
            Some(local) => {
                let (local, manager) = (local.clone(), self.manager.clone());
                // A prepare is not cancelled when its caller disconnects, and neither is the reservation.
                let work = async move {
                    let names = pod.claims.iter().map(|claim| claim.claim_name.clone());
                    let names: Vec<_> = names
                        .filter(|name| inline.iter().all(|claim| claim.id.name != *name))
                        .collect();
                    let mut tries = 1;
                    loop {
                        // Kept until the pod is in the checkpoint, which then keeps its claims reserved.
                        let reservation = local.reserve(&pod.pod, &names).await?;
                        let outcome = manager
                            .pods
                            .prepare(pod.clone(), inline.clone(), request_id.clone())
                            .await;
                        drop(reservation);
                        let taken = outcome.claims.iter().filter(|claim| {
                            names.contains(&claim.name)
                                && claim.end.as_ref().is_err_and(manager::is_in_use)
                        });
                        let taken: Vec<_> = taken.collect();
                        if taken.is_empty() || tries == LOCAL_TRIES_MAX {
                            return Ok(outcome);
                        }
                        tries += 1;
                        local
                            .allocate_again(taken.iter().filter_map(|claim| claim.uid.as_ref()))
                            .await;
                    }
                };
                let ended = self.tasks.complete("prepare-with-local-claims", work).await;
                ended.unwrap_or_else(|| Err(stopping())).map_err(refuse)?
            }
            None => self.manager.pods.prepare(pod, inline, request_id).await,
        };
        let mut response = convert::prepared(&outcome);
        if let Some(local) = &self.local_claims {
            let claims = outcome.claims.iter();
            let claims = claims.map(|claim| (namespace.to_string(), claim.name.to_string()));
            let devices = self.device_names.claim_devices(local, claims).await;
            let devices = devices.map_err(|error| {
                let message = format!("names of claims for containers: {error:#}");
                refuse(Problem::internal(ProblemCode::CdiNotWritten, message))
            })?;
            for container in &mut response.containers {
                container.cdi_devices.extend(devices.iter().cloned());
            }
            response.cdi_directories = self.device_names.directories();
        }
        Ok(Response::new(response))
    }

    async fn unprepare_pod(
        &self,
        request: Request<UnpreparePodRequest>,
    ) -> RpcResult<UnpreparePodResponse> {
        let request_id = begin("UnpreparePod", &request);
        let own = self.confined(&request)?;
        let pod = request.into_inner().pod;
        let selector = convert::selector(pod.as_ref()).map_err(refuse)?;
        let selector = match own {
            Some(own) => users::own_pods(&own, selector)?,
            None => selector,
        };
        let outcomes = self
            .manager
            .pods
            .unprepare(selector, request_id)
            .await
            .map_err(refuse)?;
        Ok(Response::new(convert::unprepared(
            &pod.unwrap_or_default(),
            &outcomes,
        )))
    }

    async fn release_claim(
        &self,
        request: Request<ReleaseClaimRequest>,
    ) -> RpcResult<ReleaseClaimResponse> {
        let request_id = begin("ReleaseClaim", &request);
        let release = convert::release_request(request.get_ref().claim.as_ref(), caller(&request));
        let release = release.map_err(refuse)?;
        let response = if request.get_ref().dry_run {
            self.manager
                .releases
                .preview(&release)
                .await
                .map(|preview| convert::release_preview(&preview, &self.pools))
        } else {
            let released = self.manager.releases.release(release, request_id).await;
            released.map(|released| convert::release_response(&released, &self.pools))
        };
        Ok(Response::new(response.map_err(refuse)?))
    }

    async fn get_pod_devices(
        &self,
        request: Request<GetPodDevicesRequest>,
    ) -> RpcResult<PreparePodResponse> {
        begin("GetPodDevices", &request);
        let pod = request.into_inner().pod.unwrap_or_default();
        let view = self.manager.pods.get(&pod.uid).ok_or_else(|| {
            let message = format!(
                "pod {}/{} (UID {:?}) has no claims or resources here",
                pod.namespace, pod.name, pod.uid
            );
            refuse(Problem::not_found(ProblemCode::NoSuchPod, message))
        })?;
        self.manager
            .files
            .check_files_of(&pod.uid)
            .await
            .map_err(refuse)?;
        Ok(Response::new(convert::known_pod(&view)))
    }

    async fn pod_might_need_unprepare(
        &self,
        request: Request<PodMightNeedUnprepareRequest>,
    ) -> RpcResult<PodMightNeedUnprepareResponse> {
        begin("PodMightNeedUnprepare", &request);
        let might = self
            .manager
            .pods
            .might_need_unprepare(&request.get_ref().pod_uid);
        Ok(Response::new(PodMightNeedUnprepareResponse { might }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> RpcResult<ContainerDevices> {
        let request_id = begin("StartContainer", &request);
        let request = request.into_inner();
        let (pod, container) = convert::start_request(request).map_err(refuse)?;
        let answer = self
            .manager
            .pods
            .start_container(pod, container, request_id)
            .await
            .map_err(refuse)?;
        Ok(Response::new(convert::container_devices(&answer)))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> RpcResult<GetCapacityResponse> {
        begin("GetCapacity", &request);
        let manager = &self.manager;
        let mut answer = convert::capacity(
            &manager.devices.capacity(),
            &manager.pods.list(),
            |driver, id| manager.records.is_claimed(driver, id),
        );
        if let Some(extended_resources) = &self.extended_resources {
            let disabled = manager
                .adapters
                .as_ref()
                .map(|adapters| adapters.disabled())
                .unwrap_or_default();
            let disabled = disabled.into_iter().map(|(driver, _)| driver).collect();
            convert::set_mechanisms(&mut answer, &extended_resources.mechanisms(), &disabled);
        }
        Ok(Response::new(answer))
    }

    async fn get_topology_hints(
        &self,
        request: Request<GetTopologyHintsRequest>,
    ) -> RpcResult<GetTopologyHintsResponse> {
        begin("GetTopologyHints", &request);
        let pod = convert::resources_request(request.get_ref()).map_err(refuse)?;
        let scope = convert::hint_scope(&request.get_ref().scope).map_err(refuse)?;
        Ok(Response::new(convert::hints(
            &self.manager.choices.hints(&pod, scope),
        )))
    }

    async fn cover_allocated(
        &self,
        request: Request<CoverAllocatedRequest>,
    ) -> RpcResult<CoverAllocatedResponse> {
        begin("CoverAllocated", &request);
        let request = request.into_inner();
        let (pod, mut allocatable) = convert::cover_request(&request).map_err(refuse)?;
        self.manager.devices.cover_allocated(&pod, &mut allocatable);
        Ok(Response::new(convert::covered(request, allocatable)))
    }

    async fn list_drivers(
        &self,
        request: Request<ListDriversRequest>,
    ) -> RpcResult<ListDriversResponse> {
        begin("ListDrivers", &request);
        let name = &request.get_ref().name;
        let drivers = self.registry.list().into_iter().filter(|view| {
            name.is_empty()
                || is_source(&view.source, name)
                || view.name.as_ref().is_some_and(|n| n.as_str() == name)
        });
        Ok(Response::new(ListDriversResponse {
            drivers: drivers
                .map(|view| convert::driver(&view, &self.pools))
                .collect(),
        }))
    }

    async fn list_devices(
        &self,
        request: Request<ListDevicesRequest>,
    ) -> RpcResult<ListDevicesResponse> {
        begin("ListDevices", &request);
        let wanted = &request.get_ref().driver;
        Ok(Response::new(ListDevicesResponse {
            devices: self.devices_of(wanted),
            left_out: self.left_out_of(wanted),
        }))
    }

    async fn list_claims(
        &self,
        request: Request<ListClaimsRequest>,
    ) -> RpcResult<ListClaimsResponse> {
        begin("ListClaims", &request);
        let own = self.confined(&request)?;
        let mut request = request.into_inner();
        if let Some(own) = &own {
            request.namespace.clone_from(own);
        }
        let request = &request;
        let (pools, boot_id, with_timeline) = (
            &self.pools,
            self.node.boot_id.as_str(),
            request.with_timeline,
        );
        let claims = self
            .manager
            .records
            .claims()
            .into_iter()
            .filter(|claim| is_wanted(request, &claim.id));
        let mut answer = ListClaimsResponse {
            claims: claims
                .map(|claim| {
                    convert::claim_status(
                        &self.manager.retries.claim_view(claim),
                        pools,
                        &self.manager.gone_devices,
                        boot_id,
                        with_timeline,
                    )
                })
                .collect(),
            ..Default::default()
        };
        if request.with_ended {
            let ended = self.manager.records.ended_claims().into_iter();
            answer.ended = ended
                .filter(|ended| is_wanted(request, &ended.id))
                .map(|ended| convert::ended_claim(&ended, pools))
                .collect();
        }
        if with_timeline {
            let released = self
                .manager
                .records
                .released_claims()
                .into_iter()
                .filter(|released| is_wanted(request, &released.id));
            answer.released = released
                .map(|released| convert::released_claim(&released, pools))
                .collect();
            let refused = self
                .manager
                .retries
                .refused_claims()
                .into_iter()
                .filter(|refused| is_wanted(request, &refused.claim));
            answer.refused = refused
                .map(|refused| convert::refused_claim(&refused))
                .collect();
            let waiting = self.local_claims.iter().flat_map(LocalClaims::waiting);
            let waiting = (1..)
                .zip(waiting)
                .filter(|(_, claim)| is_wanted(request, &claim.id));
            answer.waiting = waiting
                .map(|(place, mut claim)| {
                    if let Some(own) = &own {
                        claim.hide_others(own);
                    }
                    convert::waiting_claim(place, claim)
                })
                .collect();
        }
        Ok(Response::new(answer))
    }

    async fn list_pods(&self, request: Request<ListPodsRequest>) -> RpcResult<ListPodsResponse> {
        begin("ListPods", &request);
        let pods = self
            .manager
            .pods
            .list()
            .iter()
            .map(convert::pod_status)
            .collect();
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_node(&self, request: Request<GetNodeRequest>) -> RpcResult<NodeStatus> {
        begin("GetNode", &request);
        let mut claims = BTreeMap::new();
        for claim in self.manager.records.claims() {
            *claims.entry(claim.state.as_str().to_owned()).or_insert(0) += 1;
        }
        Ok(Response::new(NodeStatus {
            name: self.node.name.clone(),
            boot_id: self.node.boot_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_ms: self.started_ms,
            // Those of device plugins without an adapter are among the resources.
            drivers_serving: convert::count(
                self.registry
                    .instances
                    .all()
                    .iter()
                    .filter(|d| !is_plugin_driver(&d.identity.name))
                    .count(),
            ),
            claims,
            pods: convert::count(self.manager.pods.count()),
            devices_unhealthy: convert::count(
                self.devices_of("")
                    .iter()
                    .filter(|device| device.health == HealthState::Unhealthy.as_str())
                    .count(),
            ),
            conditions: self
                .conditions
                .list()
                .iter()
                .map(convert::condition)
                .collect(),
            recorded_hardware: self.recorded_hardware,
        }))
    }

    async fn reload_driver(
        &self,
        request: Request<ReloadDriverRequest>,
    ) -> RpcResult<ReloadDriverResponse> {
        begin("ReloadDriver", &request);
        let view = self
            .registry
            .reload(&request.get_ref().name)
            .await
            .map_err(refuse)?;
        Ok(Response::new(ReloadDriverResponse {
            driver: Some(convert::driver(&view, &self.pools)),
        }))
    }

    async fn resume_driver(
        &self,
        request: Request<ResumeDriverRequest>,
    ) -> RpcResult<ResumeDriverResponse> {
        begin("ResumeDriver", &request);
        let view = self
            .registry
            .resume(&request.get_ref().name)
            .map_err(refuse)?;
        Ok(Response::new(ResumeDriverResponse {
            driver: Some(convert::driver(&view, &self.pools)),
        }))
    }

    async fn assign_driver(
        &self,
        request: Request<AssignDriverRequest>,
    ) -> RpcResult<AssignDriverResponse> {
        begin("AssignDriver", &request);
        let by = caller(&request);
        let AssignDriverRequest { name, source } = request.into_inner();
        let name = DriverName::new(&name).map_err(|error| {
            refuse(Problem::invalid(ProblemCode::BadRequest, error.to_string()))
        })?;
        let view = self
            .registry
            .names
            .assign(&name, &source, by)
            .await
            .map_err(refuse)?;
        Ok(Response::new(AssignDriverResponse {
            driver: Some(convert::driver(&view, &self.pools)),
        }))
    }

    async fn list_adapters(
        &self,
        request: Request<ListAdaptersRequest>,
    ) -> RpcResult<ListAdaptersResponse> {
        begin("ListAdapters", &request);
        let views = self
            .manager
            .adapters
            .as_ref()
            .map(|adapters| adapters.list())
            .unwrap_or_default();
        let adapters = views.iter().map(|view| self.adapter(view)).collect();
        Ok(Response::new(ListAdaptersResponse { adapters }))
    }

    async fn switch_adapter(
        &self,
        request: Request<SwitchAdapterRequest>,
    ) -> RpcResult<SwitchAdapterResponse> {
        begin("SwitchAdapter", &request);
        let SwitchAdapterRequest { driver, enabled } = request.into_inner();
        let adapters = self.manager.adapters.as_ref().ok_or_else(|| {
            refuse(Problem::not_found(
                ProblemCode::AdapterUnknown,
                "there are no adapters",
            ))
        })?;
        let view = adapters
            .set_enabled(&driver, enabled)
            .await
            .map_err(refuse)?;
        Ok(Response::new(SwitchAdapterResponse {
            adapter: Some(self.adapter(&view)),
        }))
    }

    type RecordDriverStream = Lines;

    async fn record_driver(
        &self,
        request: Request<RecordDriverRequest>,
    ) -> RpcResult<Self::RecordDriverStream> {
        begin("RecordDriver", &request);
        Ok(Response::new(
            self.recorded.record(request.into_inner()).await?,
        ))
    }

    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<v1::WatchEvent, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> RpcResult<Self::WatchStream> {
        begin("Watch", &request);
        let events = BroadcastStream::new(self.changes.listen()).map(|event| match event {
            Ok(changed) => Ok(v1::WatchEvent {
                kind: changed.kind.as_str().to_owned(),
                name: changed.name,
                state: changed.state,
                at_ms: changed.at_ms,
            }),
            Err(lost) => Err(Status::data_loss(format!(
                "the watch fell behind ({lost}): list again"
            ))),
        });
        let stopped = self.tasks.stopped();
        let events = futures::StreamExt::take_until(events, stopped);
        Ok(Response::new(Box::pin(events)))
    }
}

fn is_wanted(request: &ListClaimsRequest, id: &ObjectRef) -> bool {
    (request.namespace.is_empty() || id.namespace.as_str() == request.namespace)
        && (request.name.is_empty()
            || id.name.as_str() == request.name
            || id.uid.as_str() == request.name)
}

impl NodeApi {
    fn adapter(&self, view: &AdapterView) -> v1::Adapter {
        let mechanisms = self
            .extended_resources
            .as_ref()
            .map(ExtendedResources::mechanisms);
        convert::adapter(view, &self.pools, mechanisms.as_deref())
    }

    /// Devices of a driver, or of a device plugin by its socket; of all, if the name is empty.
    fn devices_of(&self, wanted: &str) -> Vec<v1::Device> {
        let drivers = self.registry.instances.all().into_iter();
        let drivers =
            drivers.filter(|driver| wanted.is_empty() || driver.identity.name.as_str() == wanted);
        let (capacity, pods) = (self.manager.devices.capacity(), self.manager.pods.list());
        let mut devices: Vec<_> = drivers
            .flat_map(|driver| self.devices(&driver, &pods))
            .collect();
        let of_plugins = plugin_devices(&capacity);
        devices.extend(of_plugins.filter(|device| wanted.is_empty() || device.driver == wanted));
        devices
    }

    /// What a driver, or a device plugin by its socket, leaves out; of all, if the name is empty.
    fn left_out_of(&self, wanted: &str) -> Vec<v1::LeftOut> {
        let drivers = self.registry.instances.all().into_iter();
        let of_drivers = drivers.filter_map(|driver| {
            let left_out = driver.inventory?.borrow().left_out.clone();
            convert::left_out(driver.identity.name.as_str(), "", &left_out)
        });
        let of_plugins = self.manager.devices.left_out().into_iter();
        let of_plugins = of_plugins.filter_map(|(resource, source, left_out)| {
            let source = source.map_or_else(String::new, |of| convert::resource_source(&of));
            convert::left_out(&source, resource.as_str(), &left_out)
        });
        of_drivers
            .chain(of_plugins)
            .filter(|left_out| wanted.is_empty() || left_out.driver == wanted)
            .collect()
    }

    fn devices(&self, driver: &Driver, pods: &[PodView]) -> Vec<v1::Device> {
        let Some(inventory) = &driver.inventory else {
            return Vec::new();
        };
        let published = inventory.borrow().clone();
        let name = &driver.identity.name;
        let users = users(pods, name);
        let mut devices = Vec::new();
        for (pool_name, pool) in &published.inventory.pools {
            for (device_name, device) in &pool.devices {
                let health = published
                    .health
                    .get(&(pool_name.clone(), device_name.clone()));
                let health = health.cloned().unwrap_or_default();
                let readings = published
                    .telemetry
                    .readings
                    .get(&(pool_name.clone(), device_name.clone()));
                let claims = self.manager.records.users_of_device(
                    name,
                    pool_name.as_str(),
                    device_name.as_str(),
                );
                let resource = pool.extended_resource.as_ref();
                let users = resource.and_then(|resource| {
                    users.get(&(resource, format!("{pool_name}/{device_name}")))
                });
                // A pool with a resource's name is not published: no rule taints it.
                let taints = self.taints.as_ref().filter(|_| resource.is_none());
                let added =
                    taints.map(|taints| taints.of(name, pool_name, device_name, &device.taints));
                let added = added.unwrap_or_default();
                let capacity = device
                    .capacities
                    .iter()
                    .map(|(name, c)| (name.to_string(), c.value.clone()));
                let annotations = pool.annotations.iter().chain(&device.annotations);
                let annotations = annotations.map(|(key, value)| (key.clone(), value.clone()));
                devices.push(v1::Device {
                    driver: name.to_string(),
                    pool: self.pools.published(name, pool_name).to_string(),
                    name: device_name.to_string(),
                    attributes_json: convert::attributes_json(&device.attributes),
                    capacity: capacity.collect(),
                    health: health.state.as_str().to_owned(),
                    health_message: health.message,
                    claims: claims.iter().map(convert::object_message).collect(),
                    extended_resource: resource.map(ToString::to_string).unwrap_or_default(),
                    numa_nodes: device.numa_nodes.clone(),
                    pods: users
                        .into_iter()
                        .flatten()
                        .copied()
                        .map(convert::object_message)
                        .collect(),
                    taints: convert::taints(&device.taints, &added),
                    more_taint_rules: convert::count(added.more_rules),
                    readings: readings.cloned().into_iter().flatten().collect(),
                    annotations: annotations.collect(),
                });
            }
        }
        devices
    }
}

/// Pods that have a device of a driver's pool under a resource's name, by the resource and `POOL/DEVICE`. A removed pod has it until
/// the driver has unprepared it.
fn users<'a>(
    pods: &'a [PodView],
    driver: &DriverName,
) -> BTreeMap<(&'a ExtendedResource, String), BTreeSet<&'a ObjectRef>> {
    let mut users: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for pod in pods {
        for held in pod
            .resources
            .iter()
            .filter(|held| held.driver.as_ref() == Some(driver))
        {
            for device in held.devices.keys() {
                users
                    .entry((&held.resource, device.clone()))
                    .or_default()
                    .insert(&pod.pod);
            }
        }
    }
    users
}

/// Returns whether a driver's file or socket has this name: of a file with or without `.wasm`.
fn is_source(source: &str, name: &str) -> bool {
    source == name || source.strip_suffix(".wasm") == Some(name)
}

fn plugin_devices(capacity: &Capacity) -> impl Iterator<Item = v1::Device> {
    let resources = capacity
        .resources
        .iter()
        .filter(|resource| matches!(resource.source, ResourceSource::Plugin(_)));
    resources.flat_map(|resource| {
        resource
            .devices
            .iter()
            .map(|view| convert::plugin_device(resource, view))
    })
}
