use std::sync::Arc; use std::path::PathBuf; use std::time::Duration;
use super::*; use super::grant::*;
#[derive(Default,Clone)]
pub struct WasmSettings { pub cache_dir: Option<PathBuf>, pub sysfs_root: PathBuf, pub dev_root: PathBuf, pub node: NodeFacts }
impl Default for NodeFacts { fn default()->Self{todo!()} }
pub struct WasmHost; pub struct WasmDriver; 
pub struct DriverFile{pub name:String, pub bytes: Arc<[u8]>}
#[derive(Debug, thiserror::Error)] #[error("x")] pub struct LoadError;
pub enum Trigger{Load,Timer,Events(Vec<String>),Request}
pub struct DriverInfo{pub name:DriverName,pub version:semver::Version,pub summary:String,pub capabilities:Capabilities,pub event_subsystems:Vec<String>,pub discovery_period:Duration}
impl WasmHost{ pub fn new(_:WasmSettings,_:Arc<dyn Ledger>)->Result<Arc<Self>,LoadError>{todo!()} pub async fn load(self:&Arc<Self>,_:DriverFile,_:Grant,_:Option<String>)->Result<WasmDriver,LoadError>{todo!()}}
impl WasmDriver{ pub fn info(&self)->&DriverInfo{todo!()} pub fn digest(&self)->&str{""} pub fn missing_grants(&self)->&[String]{&[]}
pub async fn discover(&self,_:&Call,_:Trigger)->Result<Inventory,Problem>{todo!()}
pub async fn check_health(&self,_:&Call)->Option<Result<HealthReport,Problem>>{todo!()}
pub async fn validate_config(&self)->Result<(),Problem>{todo!()} pub fn from_cache(&self)->bool{false} }
#[async_trait]
impl ClaimDriver for WasmDriver{ async fn prepare(&self,_:&Call,_:&[DriverClaim])->Outcomes<PreparedClaim>{todo!()} async fn unprepare(&self,_:&Call,_:&[LiveClaim])->Outcomes<()>{todo!()}}
