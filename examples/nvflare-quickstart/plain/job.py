"""FedAvg over five sites, in FLARE's simulator."""

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv

from net import Net

SITES = 5

if __name__ == "__main__":
    recipe = FedAvgRecipe(
        name="quickstart",
        model=Net(),
        min_clients=SITES,
        num_rounds=6,
        train_script="client.py",
        train_args=f"--sites {SITES} --epochs 5 --lr 0.05",
    )
    recipe.execute(SimEnv(num_clients=SITES, workspace_root="runs"))
