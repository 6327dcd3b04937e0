//! `nodedock claim`: claims of the local API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use futures::{StreamExt, stream};
use nodedock_apiserver::claim_state;
use nodedock_kube::local_client::{Applied, LocalClient};
use nodedock_proto::node::v1;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::completion::Named;
use super::local_api::{as_kubectl, connect, devices, namespace, text};
use super::output::{Format, Row, join, joined, print, print_error, print_text, table};
use super::{CommandError, Location, files, names, waiting};

const CLAIM: &str = "ResourceClaim";
/// Objects that are deleted at the same time: the daemon stores their deletions together.
const DELETES_AT_ONCE: usize = 64;
/// Kinds that say how claims are made: the same file may be applied again. The API refuses a change of what has to stay, such as a template's spec.
const UPDATED: [&str; 3] = ["DeviceClass", "ResourceClaimTemplate", "Namespace"];

#[derive(Subcommand)]
pub(super) enum ClaimCommand {
    /// Make claims, and wait until they are allocated; make or update DeviceClasses, templates and Namespaces; make Pods
    Create(CreateArgs),
    /// Show claims, and the devices that they have
    Get(GetArgs),
    /// Show claims: their requests, their devices and consumers, or why they have no devices
    Describe(NameArgs),
    /// Delete a claim, or all objects of files; a claim that is in use goes when its last pod is unprepared
    Delete(DeleteArgs),
}

#[derive(Args)]
pub(super) struct CreateArgs {
    /// ResourceClaims, ResourceClaimTemplates, DeviceClasses, Pods and Namespaces as Kubernetes YAML or JSON: a file, a directory, or - for
    /// standard input; may be given several times
    #[arg(short, long, value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,
    /// Namespace of what names none [default: default; for users other than root user-UID]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    namespace: String,
    /// Seconds to wait for the devices of a claim; 0: not at all
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
    /// Have the local API check the objects, and print what would be made; nothing is made
    #[arg(long)]
    dry_run: bool,
    /// Form of the objects of a dry run
    #[arg(short, long, value_enum, default_value_t, requires = "dry_run")]
    output: Format,
}

#[derive(Args)]
pub(super) struct GetArgs {
    /// Only this one
    #[arg(add = Named::ApiClaims.candidates())]
    name: Option<String>,
    /// Only the claims of this file or directory, or of standard input (-); may be given several times
    #[arg(short, long, value_name = "FILE", conflicts_with = "name")]
    filename: Vec<PathBuf>,
    /// Namespace [default: default; for users other than root user-UID]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    namespace: String,
    /// List claims of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["name", "filename"])]
    all_namespaces: bool,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Args)]
pub(super) struct NameArgs {
    /// NAME or NAMESPACE/NAME
    #[arg(required_unless_present = "filename", conflicts_with = "filename", add = Named::ApiClaims.candidates())]
    name: Option<String>,
    /// The objects of this file or directory, or of standard input (-); may be given several times
    #[arg(short, long, value_name = "FILE")]
    filename: Vec<PathBuf>,
    /// Namespace of what names none [default: default; for users other than root user-UID]
    #[arg(
        short,
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    namespace: String,
}

#[derive(Args)]
pub(super) struct DeleteArgs {
    #[command(flatten)]
    names: NameArgs,
    /// Seconds to wait until they are gone; 0: not at all
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
}

pub(super) async fn run(location: &Location, mut command: ClaimCommand) -> Result<()> {
    let client = connect(location).await?;
    let given = match &mut command {
        ClaimCommand::Create(args) => &mut args.namespace,
        ClaimCommand::Get(args) => &mut args.namespace,
        ClaimCommand::Describe(args) => &mut args.namespace,
        ClaimCommand::Delete(args) => &mut args.names.namespace,
    };
    if given.is_empty() {
        *given = namespace(location);
    }
    match command {
        ClaimCommand::Create(args) => create(location, &client, args).await,
        ClaimCommand::Get(args) => get(&client, args).await,
        ClaimCommand::Describe(args) => describe(location, &client, &args).await,
        ClaimCommand::Delete(args) => delete(&client, &args).await,
    }
}

fn of(object: &Value) -> String {
    let (namespace, name) = (
        text(object, "/metadata/namespace"),
        text(object, "/metadata/name"),
    );
    if namespace.is_empty() {
        name.to_owned()
    } else {
        format!("{namespace}/{name}")
    }
}

fn kind_of(object: &Value) -> String {
    match text(object, "/kind") {
        CLAIM => "claim".to_owned(),
        kind => kind.to_lowercase(),
    }
}

async fn create(location: &Location, client: &LocalClient, args: CreateArgs) -> Result<()> {
    let mut claims = Vec::new();
    let objects = files::objects(&args.filename)?;
    files::check_fields(&objects)?;
    if args.dry_run {
        return dry_run(client, &args, objects).await;
    }
    for (at, document) in objects {
        let (made, applied) = match text(&document, "/kind") {
            kind if UPDATED.contains(&kind) => client.apply(&document, &args.namespace).await,
            _ => client
                .create(&document, &args.namespace)
                .await
                .map(|made| (made, Applied::Created)),
        }
        .context(at)?;
        if text(&document, "/kind") == CLAIM {
            claims.push(made);
            continue;
        }
        let did = match applied {
            Applied::Created => "created",
            Applied::Updated => "updated",
            Applied::Unchanged => "unchanged",
        };
        print_text(&format!("{} {} {did}", kind_of(&document), of(&made)))?;
    }
    let mut is_done = true;
    for claim in claims {
        let (namespace, name) = (
            text(&claim, "/metadata/namespace"),
            text(&claim, "/metadata/name"),
        );
        if args.timeout == 0 {
            print_text(&format!("claim {} created", of(&claim)))?;
            continue;
        }
        let allocated = timeout(
            Duration::from_secs(args.timeout),
            client.until_allocated(namespace, name),
        )
        .await;
        match allocated {
            Ok(Some(claim)) => {
                print_text(&format!(
                    "claim {} allocated: {}",
                    of(&claim),
                    joined(devices(&claim))
                ))?;
            }
            Ok(None) => {
                is_done = false;
                print_error(&format!(
                    "error: claim {} was deleted before it had devices",
                    of(&claim)
                ));
            }
            Err(_) => {
                is_done = false;
                let why = waiting(location, &of(&claim)).await?;
                let why =
                    why.map_or_else(|| "it was not decided in time".to_owned(), |why| why.reason);
                print_error(&format!(
                    "error: claim {} waits for devices: {why}",
                    of(&claim)
                ));
                print_error(&format!(
                    "hint: it stays and gets them when it can; nodedock explain claim {}",
                    of(&claim)
                ));
            }
        }
    }
    CommandError::unless_done(is_done)
}

/// Prints objects as the local API would make them.
async fn dry_run(
    client: &LocalClient,
    args: &CreateArgs,
    objects: Vec<(String, Value)>,
) -> Result<()> {
    let mut checked = Vec::new();
    for (at, document) in objects {
        let is_applied = UPDATED.contains(&text(&document, "/kind"));
        let object = client.check(&document, &args.namespace, is_applied).await;
        checked.push(object.context(at)?);
    }
    let line = |object: &Value| format!("{} {} checked (dry run)", kind_of(object), of(object));
    let whole = as_kubectl(&checked, checked.len() == 1);
    print(args.output, &whole, || join(checked.iter().map(line)))
}

/// Why a claim is not allocated.
pub(super) async fn waiting(location: &Location, name: &str) -> Result<Option<v1::WaitingClaim>> {
    let mut client = super::client::connect(location).await?;
    let answer = client
        .list_claims(names::claims(name, true))
        .await?
        .into_inner();
    Ok(answer.waiting.into_iter().next())
}

/// A claim, as a row.
struct ClaimRow(Value);

/// Returns a claim of the local API in the form of one that the daemon has prepared: with the state, the pods and the devices of its object.
pub(super) fn as_status(claim: &Value) -> v1::ClaimStatus {
    let object = |of: &Value, fields: [&str; 3]| {
        let [namespace, name, uid] = fields.map(|field| text(of, field).to_owned());
        v1::ObjectRef {
            namespace,
            name,
            uid,
        }
    };
    let fields = ["/metadata/namespace", "/metadata/name", "/metadata/uid"];
    let id = object(claim, fields);
    let consumers = claim
        .pointer("/status/reservedFor")
        .and_then(Value::as_array);
    let pods = consumers.into_iter().flatten();
    let pods = pods.filter(|consumer| text(consumer, "/resource") == "pods");
    let pods = pods.map(|pod| v1::ObjectRef {
        namespace: id.namespace.clone(),
        ..object(pod, ["", "/name", "/uid"])
    });
    let results = claim
        .pointer("/status/allocation/devices/results")
        .and_then(Value::as_array);
    let mut devices: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for result in results.into_iter().flatten() {
        let [driver, pool, device] = ["/driver", "/pool", "/device"].map(|at| text(result, at));
        devices
            .entry(driver)
            .or_default()
            .push(format!("{pool}/{device}"));
    }
    let drivers = devices
        .into_iter()
        .map(|(driver, devices)| v1::ClaimDriver {
            driver: driver.to_owned(),
            devices,
            ..v1::ClaimDriver::default()
        });
    v1::ClaimStatus {
        state: claim_state(claim),
        pods: pods.collect(),
        drivers: drivers.collect(),
        id: Some(id),
        ..v1::ClaimStatus::default()
    }
}

impl Row for ClaimRow {
    const COLUMNS: &'static [super::output::Column<Self>] = &[
        ("NAMESPACE", |row| {
            text(&row.0, "/metadata/namespace").to_owned()
        }),
        ("NAME", |row| text(&row.0, "/metadata/name").to_owned()),
        ("STATE", |row| claim_state(&row.0)),
        ("DEVICES", |row| joined(devices(&row.0))),
        ("CONSUMERS", |row| joined(consumers(&row.0))),
        ("CREATED", |row| {
            text(&row.0, "/metadata/creationTimestamp").to_owned()
        }),
    ];
    const NARROW: usize = 4;
}

fn consumers(claim: &Value) -> Vec<String> {
    let consumers = claim
        .pointer("/status/reservedFor")
        .and_then(Value::as_array);
    consumers
        .into_iter()
        .flatten()
        .map(|consumer| {
            format!(
                "{}/{}",
                text(consumer, "/resource"),
                text(consumer, "/name")
            )
        })
        .collect()
}

async fn get(client: &LocalClient, args: GetArgs) -> Result<()> {
    let claims = match &args.name {
        None if args.filename.is_empty() => {
            client
                .claims((!args.all_namespaces).then_some(args.namespace.as_str()))
                .await?
        }
        name => {
            let mut claims = Vec::new();
            for (namespace, name) in named(name.as_deref(), &args.filename, &args.namespace)? {
                let claim = client.claim(&namespace, &name).await?;
                claims.push(claim.ok_or_else(|| missing("claim", &format!("{namespace}/{name}")))?);
            }
            claims
        }
    };
    let whole = as_kubectl(&claims, args.name.is_some());
    print(args.output, &whole, || rows(args.output, &claims))
}

fn rows(format: Format, claims: &[Value]) -> String {
    table(
        format,
        &claims.iter().cloned().map(ClaimRow).collect::<Vec<_>>(),
        "no claims",
    )
}

fn missing(kind: &str, name: &str) -> anyhow::Error {
    let list = if kind == "claim" {
        "; `nodedock claim get -A` lists them"
    } else {
        ""
    };
    anyhow::anyhow!("there is no {kind} {name:?} in the local API{list}")
}

/// Namespace and name of claims: of the one that is given as `[NAMESPACE/]NAME`, or of those of files.
fn named(name: Option<&str>, files: &[PathBuf], namespace: &str) -> Result<Vec<(String, String)>> {
    if let Some(name) = name {
        let (of, name) = names::split(name);
        return Ok(vec![(or_default(&of, namespace), name)]);
    }
    let objects = files::objects(files)?;
    let claims = objects
        .iter()
        .map(|(_, document)| document)
        .filter(|of| text(of, "/kind") == CLAIM);
    let claims: Vec<_> = claims
        .map(|claim| {
            (
                or_default(text(claim, "/metadata/namespace"), namespace),
                text(claim, "/metadata/name").to_owned(),
            )
        })
        .collect();
    if claims.is_empty() {
        anyhow::bail!(
            "there is no ResourceClaim in {}",
            joined(files.iter().map(|file| file.display()))
        );
    }
    Ok(claims)
}

fn or_default(of: &str, namespace: &str) -> String {
    if of.is_empty() {
        namespace.to_owned()
    } else {
        of.to_owned()
    }
}

async fn describe(location: &Location, client: &LocalClient, args: &NameArgs) -> Result<()> {
    for (namespace, name) in named(args.name.as_deref(), &args.filename, &args.namespace)? {
        let whole = format!("{namespace}/{name}");
        let claim = client
            .claim(&namespace, &name)
            .await?
            .ok_or_else(|| missing("claim", &whole))?;
        let row = ClaimRow(claim);
        let mut lines = vec![format!("claim {whole} is {}", claim_state(&row.0))];
        let requests = row
            .0
            .pointer("/spec/devices/requests")
            .and_then(Value::as_array);
        lines.extend(requests.into_iter().flatten().map(request_line));
        let results = row
            .0
            .pointer("/status/allocation/devices/results")
            .and_then(Value::as_array);
        let results = results.into_iter().flatten().zip(devices(&row.0));
        lines.extend(results.map(|(result, device)| {
            format!("  request {} has {device}", text(result, "/request"))
        }));
        lines.extend(
            consumers(&row.0)
                .into_iter()
                .map(|consumer| format!("  reserved for {consumer}")),
        );
        if let Some(waiting) = waiting(location, &whole).await? {
            let created = text(&row.0, "/metadata/creationTimestamp");
            lines.extend(waiting::lines(&waiting, created));
        }
        print_text(&join(lines))?;
    }
    Ok(())
}

fn request_line(request: &Value) -> String {
    let wanted = match request["firstAvailable"].as_array() {
        Some(alternatives) => alternatives
            .iter()
            .map(device_request)
            .collect::<Vec<_>>()
            .join(", or "),
        None => device_request(&request["exactly"]),
    };
    format!("  request {}: {wanted}", text(request, "/name"))
}

fn device_request(request: &Value) -> String {
    let count = match text(request, "/allocationMode") {
        "All" => "all".to_owned(),
        _ => request["count"].as_u64().unwrap_or(1).to_string(),
    };
    let selectors = request["selectors"].as_array().into_iter().flatten();
    let selectors: Vec<_> = selectors
        .map(|selector| text(selector, "/cel/expression").to_owned())
        .collect();
    let of_class = format!("{count} of class {}", text(request, "/deviceClassName"));
    if selectors.is_empty() {
        of_class
    } else {
        format!("{of_class} with {}", selectors.join(" && "))
    }
}

async fn delete(client: &LocalClient, args: &DeleteArgs) -> Result<()> {
    let NameArgs {
        name,
        filename,
        namespace,
    } = &args.names;
    let objects = match name {
        Some(name) => {
            let (of, name) = names::split(name);
            let of = if of.is_empty() { namespace } else { &of };
            let metadata = json!({ "namespace": of, "name": name });
            let claim =
                json!({ "apiVersion": "resource.k8s.io/v1", "kind": CLAIM, "metadata": metadata });
            vec![(format!("claim {of}/{name}"), claim)]
        }
        None => files::objects(filename)?,
    };
    let (mut is_done, mut failed, mut claims) = (true, None, Vec::new());
    // All are deleted before one is waited for: a claim may be in use by a Pod of the same file.
    let deletions = objects.iter().map(|(at, object)| async move {
        let deleted = client.delete(object, namespace).await;
        (object, deleted.with_context(|| at.clone()))
    });
    let mut deletions = stream::iter(deletions).buffered(DELETES_AT_ONCE);
    while let Some((object, deleted)) = deletions.next().await {
        let kind = kind_of(object);
        match deleted {
            Ok(Some(deleted)) if kind == "claim" => claims.push(deleted),
            Ok(Some(deleted)) => print_text(&format!("{kind} {} deleted", of(&deleted)))?,
            Ok(None) => {
                is_done = false;
                print_error(&format!("error: {}", missing(&kind, &of(object))));
            }
            // The other objects are deleted all the same.
            Err(error) if failed.is_none() => failed = Some(error),
            Err(error) => print_error(&format!("error: {error:#}")),
        }
    }
    let most = Duration::from_secs(args.timeout);
    for claim in claims {
        let [namespace, name, uid] = ["/metadata/namespace", "/metadata/name", "/metadata/uid"]
            .map(|field| text(&claim, field));
        if args.timeout == 0 || client.until_gone(namespace, name, uid, most).await {
            print_text(&format!("claim {} deleted", of(&claim)))?;
        } else {
            is_done = false;
            print_error(&format!(
                "error: claim {} is in use: it goes when its last pod is unprepared",
                of(&claim)
            ));
        }
    }
    failed.map_or_else(|| CommandError::unless_done(is_done), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_row_has_state_and_devices() {
        let claim = |status: Value| {
            ClaimRow(
                json!({ "metadata": { "namespace": "default", "name": "one" }, "status": status }),
            )
        };
        let cells = |row: ClaimRow| {
            ClaimRow::COLUMNS
                .iter()
                .map(|(_, cell)| cell(&row))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            cells(claim(json!({}))),
            ["default", "one", "pending", "", "", ""]
        );
        let results = json!([{ "request": "r", "driver": "d", "pool": "n/p", "device": "x" }]);
        let allocated = json!({ "allocation": { "devices": { "results": results } },
            "reservedFor": [{ "resource": "pods", "name": "web", "uid": "u" }] });
        let expected = [
            "default",
            "one",
            "allocated,reserved",
            "d/n/p/x",
            "pods/web",
            "",
        ];
        assert_eq!(cells(claim(allocated)), expected);
    }

    #[test]
    fn object_is_shown_like_prepared_claim() {
        let results = json!([
            { "driver": "d", "pool": "n/p", "device": "x" },
            { "driver": "e", "pool": "n/q", "device": "y" },
            { "driver": "d", "pool": "n/p", "device": "z" },
        ]);
        let claim = json!({
            "metadata": { "namespace": "default", "name": "one", "uid": "u" },
            "status": {
                "allocation": { "devices": { "results": results } },
                "reservedFor": [
                    { "resource": "pods", "name": "web", "uid": "w" },
                    { "resource": "podgroups", "name": "g", "uid": "v" },
                ],
            },
        });
        let status = as_status(&claim);
        assert_eq!(status.state, "allocated,reserved");
        assert_eq!(status.id.unwrap().uid, "u");
        let pods: Vec<_> = status
            .pods
            .iter()
            .map(super::super::describe::name)
            .collect();
        assert_eq!(pods, ["default/web"]);
        let devices: Vec<_> = status
            .drivers
            .iter()
            .map(|of| of.devices.join(","))
            .collect();
        assert_eq!(devices, ["n/p/x,n/p/z", "n/q/y"]);
        assert_eq!(as_status(&json!({})).state, "pending");
    }

    #[test]
    fn file_claims_get_the_given_namespace() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("all.yaml");
        let group = "apiVersion: resource.k8s.io/v1\n";
        let claim =
            |metadata: &str| format!("{group}kind: ResourceClaim\nmetadata: {metadata}\n---\n");
        let class = format!("{group}kind: DeviceClass\n");
        let text = claim("{name: a}") + &claim("{name: b, namespace: own}") + &class;
        std::fs::write(&file, text).unwrap();
        let both = [
            ("team".to_owned(), "a".to_owned()),
            ("own".to_owned(), "b".to_owned()),
        ];
        assert_eq!(
            named(None, std::slice::from_ref(&file), "team").unwrap(),
            both
        );
        assert_eq!(named(Some("own/b"), &[], "team").unwrap(), both[1..]);
        std::fs::write(&file, class).unwrap();
        let error = named(None, &[file], "team").unwrap_err().to_string();
        assert!(
            error.starts_with("there is no ResourceClaim in /"),
            "{error}"
        );
    }

    #[test]
    fn a_request_says_what_it_wants() {
        let exact = json!({ "name": "r", "exactly": { "deviceClassName": "gpu", "count": 2,
            "selectors": [{ "cel": { "expression": "true" } }] } });
        assert_eq!(
            request_line(&exact),
            "  request r: 2 of class gpu with true"
        );
        let either = json!({ "name": "r", "firstAvailable": [
            { "name": "a", "deviceClassName": "gpu", "allocationMode": "All" }, { "name": "b", "deviceClassName": "cpu" }] });
        assert_eq!(
            request_line(&either),
            "  request r: all of class gpu, or 1 of class cpu"
        );
    }
}
