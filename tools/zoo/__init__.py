"""Models of torchvision, timm, segmentation-models-pytorch and MONAI against themselves, split over ranks.

models      which models, how they are built, and at which sizes
verdict     what is said of one model, and its JSON form
check       one model on ranks: is it exact, and if not, is it more than its own rounding
survey      one model's plan at a realistic size: FLOPs split, gathers, halos
schedule    several pools of ranks at a time
page        the coverage page from the results
"""
