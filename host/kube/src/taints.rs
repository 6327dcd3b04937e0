//! The taints of this node's devices beside those of their drivers: of the host, on devices that are unhealthy or could not be prepared,
//! and of the cluster's admins (DeviceTaintRules).
//!
//! Given the API server, it lists and watches the rules, which are few in a cluster, where they are served and the account may read them.
//! Emits the taints of a device for display. Never enforces one: the scheduler and the eviction controller do. Without the API, or
//! without the right, no rule is known, and nothing else changes.

mod rule;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::watcher::{Config, DefaultBackoff, Event, watcher};
use parking_lot::Mutex;

pub use self::rule::RuleTaint;
use self::rule::{PublishedDevice, RuleError, TAINT_RULES_MAX, TaintRules};
use crate::client::{API_RETRY_MAX, ApiError, ErrorKind, KubeClient, WATCH_PAGE_ITEMS, meaning};
use crate::pools::NodePools;
use crate::slices::SliceReport;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ChangedKind, DeviceName, DriverName, PoolName, Problem, ProblemCode, Taint};

/// Delay after which it is checked again whether the rules are served and may be read.
const TAINT_RULES_RETRY: Duration = Duration::from_secs(600);

/// Subject of the condition about rules that are left out.
const SUBJECT: &str = "devicetaintrules";

/// Handle to the taints. Clones share the rules.
#[derive(Clone)]
pub struct DeviceTaints {
    rules: Arc<Mutex<TaintRules>>,
    slices: SliceReport,
    pools: NodePools,
}

/// The taints of a device that its driver does not know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AddedTaints {
    /// Taints of the host, because the device is unhealthy or could not be prepared.
    pub host: Vec<Taint>,
    /// Taints of rules: the first of them, by name.
    pub rules: Vec<RuleTaint>,
    /// Number of other rules that taint the device.
    pub more_rules: usize,
}

impl DeviceTaints {
    /// Starts the task that watches the rules.
    pub fn start(
        tasks: &Tasks,
        client: &KubeClient,
        changes: Changes,
        conditions: Conditions,
        slices: SliceReport,
        pools: NodePools,
    ) -> Self {
        let taints = Self {
            rules: Arc::default(),
            slices,
            pools,
        };
        let (client, rules) = (client.clone(), taints.rules.clone());
        let left_out = LeftOut::default();
        let watch = RuleWatch {
            client,
            rules,
            left_out,
            changes,
            conditions,
            is_reported: false,
        };
        // Rules are only read.
        tasks.spawn_until_stopped("taint-rules", watch.run());
        taints
    }

    /// Returns the taints of a published device, by the driver's own name of the pool. `own`: those that it has from its driver.
    pub fn of(
        &self,
        driver: &DriverName,
        pool: &PoolName,
        device: &DeviceName,
        own: &[Taint],
    ) -> AddedTaints {
        let host = self.slices.host_taints(driver, pool, device, own);
        let pool = &self.pools.published(driver, pool);
        let (rules, more_rules) = self.rules.lock().of(PublishedDevice {
            driver,
            pool,
            device,
        });
        AddedTaints {
            host,
            rules,
            more_rules,
        }
    }
}

/// The rules of a list that has not ended.
#[derive(Default)]
struct Listed {
    rules: TaintRules,
    left_out: LeftOut,
}

/// Rules that are left out, by name, and why.
#[derive(Default)]
struct LeftOut(BTreeMap<String, RuleError>);

impl LeftOut {
    /// Takes what became of a rule that is new or has changed. Of very many the first are kept.
    fn note(&mut self, rule: &DynamicObject, applied: Result<(), RuleError>) {
        let name = rule.metadata.name.clone().unwrap_or_default();
        self.0.remove(&name);
        if let Err(error) = applied
            && self.0.len() < TAINT_RULES_MAX
        {
            self.0.insert(name, error);
        }
    }

    fn problem(&self) -> Option<Problem> {
        let error = self.0.values().next()?;
        let more = match self.0.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let message =
            format!("the taints of a rule that cannot be read are not shown: {error}{more}");
        Some(Problem::invalid(ProblemCode::TaintRulesLeftOut, message).with("count", self.0.len()))
    }
}

struct RuleWatch {
    client: KubeClient,
    rules: Arc<Mutex<TaintRules>>,
    left_out: LeftOut,
    changes: Changes,
    conditions: Conditions,
    /// It was logged that the rules cannot be read.
    is_reported: bool,
}

impl RuleWatch {
    async fn run(mut self) {
        loop {
            let ended = match self.client.taint_rules().await {
                Ok(Some(resource)) => self.follow(&resource).await,
                Ok(None) => ApiError::new(ErrorKind::NotServed, "DeviceTaintRules"),
                Err(error) => error,
            };
            tokio::time::sleep(self.end(&ended)).await;
        }
    }

    /// Takes what ended the watch. Returns when to try again.
    fn end(&mut self, error: &ApiError) -> Duration {
        match error.kind {
            ErrorKind::NotServed | ErrorKind::NotFound => {
                tracing::debug!(%error, "no device taint rules are read");
            }
            ErrorKind::Forbidden => {
                if !std::mem::replace(&mut self.is_reported, true) {
                    tracing::warn!(
                        %error,
                        "device taint rules cannot be read, their taints are not shown: the account needs list and watch of devicetaintrules"
                    );
                }
            }
            // What was read before still counts.
            _ => return API_RETRY_MAX,
        }
        self.replace(Listed::default());
        TAINT_RULES_RETRY
    }

    /// Follows the rules until the API server does not serve them any more, or forbids it.
    async fn follow(&mut self, resource: &ApiResource) -> ApiError {
        let api: Api<DynamicObject> = Api::all_with(self.client.client(), resource);
        let mut events = watcher(api, Config::default().page_size(WATCH_PAGE_ITEMS)).boxed();
        let mut backoff = DefaultBackoff::default();
        let mut listed = Listed::default();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.observe(event, &mut listed),
                Err(error) => {
                    let error = meaning(error);
                    if matches!(
                        error.kind,
                        ErrorKind::NotServed | ErrorKind::NotFound | ErrorKind::Forbidden
                    ) {
                        return error;
                    }
                    tracing::debug!(%error, "device taint rules cannot be watched now");
                    tokio::time::sleep(backoff.next().unwrap_or(API_RETRY_MAX)).await;
                }
            }
        }
        ApiError::unreachable("the watch of DeviceTaintRules ended")
    }

    fn observe(&mut self, event: Event<DynamicObject>, listed: &mut Listed) {
        match event {
            Event::Init => *listed = Listed::default(),
            Event::InitApply(rule) => {
                let applied = listed.rules.apply(&rule);
                listed.left_out.note(&rule, applied);
            }
            Event::InitDone => {
                if std::mem::take(&mut self.is_reported) {
                    tracing::info!("device taint rules are read again");
                }
                self.replace(std::mem::take(listed));
            }
            Event::Apply(rule) => {
                let applied = self.rules.lock().apply(&rule);
                self.left_out.note(&rule, applied);
                self.report();
                self.tell();
            }
            Event::Delete(rule) => {
                self.rules.lock().remove(&rule);
                self.left_out.note(&rule, Ok(()));
                self.report();
                self.tell();
            }
        }
    }

    fn replace(&mut self, listed: Listed) {
        self.left_out = listed.left_out;
        self.report();
        let is_same = *self.rules.lock() == listed.rules;
        if !is_same {
            *self.rules.lock() = listed.rules;
            self.tell();
        }
    }

    fn report(&self) {
        self.conditions.update(
            ProblemCode::TaintRulesLeftOut,
            SUBJECT,
            self.left_out.problem(),
        );
    }

    fn tell(&self) {
        self.changes.report(ChangedKind::Device, SUBJECT, "changed");
    }
}
